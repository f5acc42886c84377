"""The patched stack answers as transformers does, and with a fault in it does not.

Both compute in float32, from the same dequantized weights; what is left is the order of sums. Measured: 7e-5
in log probability over every position and token. Each fault of mutations.yml moves the answer by 30 times the
tolerance or more, so that neither a slower machine's other kernels nor luck decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeGuard

import overlay
import pytest
import yaml
from conftest import HERE, Stack, altered
from octoserve import patches

TOLERANCE = 1e-3
MARGIN = 30
CASES = list(yaml.safe_load((HERE / "cases.yml").read_text(encoding="utf-8")))
MUTATIONS: dict[str, Any] = yaml.safe_load((HERE / "mutations.yml").read_text(encoding="utf-8"))
PROBE = "glm5_unsloth_types_in_splits"


def agrees(result: dict[str, Any]) -> bool:
    return bool(result.get("same_tokens")) and result["difference"] < TOLERANCE


@pytest.fixture(scope="module")
def scores(patched: Stack, models: dict[str, Path]) -> dict[str, Any]:
    return patched.score(list(models.values()))


@pytest.mark.parametrize("case", CASES)
def test_the_patched_stack_agrees_with_transformers(scores: dict[str, Any], case: str) -> None:
    assert agrees(scores[case]), scores[case]


def test_two_ranks_agree_with_transformers(patched: Stack, models: dict[str, Path]) -> None:
    options = {"tensor_parallel_size": 2}
    result = patched.score([models[PROBE]], options, VLLM_CPU_OMP_THREADS_BIND="nobind")[PROBE]
    assert agrees(result), result


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    python: str,
    series: patches.Series,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[Any]]]:
    """What each selected mutation ends in. Two run at once, since most of a run is one thread that imports."""
    folder = tmp_path_factory.mktemp("sites")

    def score(name: str) -> Any:
        mutation = MUTATIONS[name]
        left_out = {mutation["take_out"]} if "take_out" in mutation else set()
        edits = [overlay.Edit(**mutation["edit"])] if "edit" in mutation else []
        with altered(python, series, folder / name, left_out, edits) as stack:
            return stack.score([models[PROBE]], OMP_NUM_THREADS="1")[PROBE]

    selected = [str(item.callspec.params["name"]) for item in request.session.items if is_mutation_test(item)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(score, name) for name in selected}
        pool.shutdown(cancel_futures=True)


def is_mutation_test(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return isinstance(item, pytest.Function) and item.originalname == "test_a_fault_is_seen"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_seen(outcomes: dict[str, Future[Any]], name: str) -> None:
    result, wanted = outcomes[name].result(), MUTATIONS[name]["fails_with"]
    if wanted == "difference":
        assert result.get("difference", 0) > MARGIN * TOLERANCE, result
    else:
        assert re.search(wanted, result.get("error", "no error")), result


def test_every_patch_with_a_cpu_proof_is_taken_out_once(series: patches.Series) -> None:
    taken_out = sorted(mutation["take_out"] for mutation in MUTATIONS.values() if "take_out" in mutation)
    assert taken_out == sorted(patch.file for patch in series.patches if patch.proof == "cpu")
