"""The patched stack answers as transformers and llama.cpp do, and with a fault in it does not.

All compute in float32, from the same dequantized weights; what is left is the order of sums. Measured: 7e-5
in log probability over every position and token. Each fault of mutations.yml moves the answer by 30 times the
tolerance or more, so that neither a slower machine's other kernels nor luck decides.

On the file as it is, llama.cpp rounds activations to 8 bits, and where that tips a router's choice a position comes
out quite different. So there the mean is compared: 0.01 to 0.12 over all cases, 0.42 or more with a fault.

Twice: as a CPU serves, everything dequantized while loading; and through the quantized layers of a GPU, with
NumPy in place of the kernels, which is what proves the sharding of quantized blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeGuard

import conftest
import overlay
import pytest
import yaml
from conftest import HERE, Stack, altered
from octoserve import patches

TOLERANCE = 1e-3
MEAN_TOLERANCE = 0.2  # of llama.cpp on the file as it is
MARGIN = 30
#: What dense attention computes right.
CASES = {name: case for name, case in conftest.CASES.items() if not case.get("sparse")}
MUTATIONS: dict[str, Any] = yaml.safe_load((HERE / "mutations.yml").read_text(encoding="utf-8"))
PROBE = "glm5_unsloth_types_in_splits"
QUANTIZED = {"quantization": "gguf"}
#: Between one rank and two only the order of float32 sums differs.
RANK_TOLERANCE = 1e-4
#: Patches that change no answer; test_plugin.py shows what they do.
SHOWN_IN_PARTS = {
    "0011-rename-the-parameter-not-the-module.patch",
    "0012-read-a-file-once-for-all-ranks.patch",
    "0014-keep-the-shards-of-a-fused-layer-contiguous.patch",
    "0020-check-a-file-without-loading-it.patch",
}


def agrees(result: dict[str, Any], case: str = PROBE) -> bool:
    agreed = bool(result.get("same_tokens")) and result["difference"] < TOLERANCE
    if not agreed or CASES[case].get("llama_cpp_differs"):
        return agreed
    return bool(result["llama_cpp"] < TOLERANCE and result["llama_cpp_quantized"] < MEAN_TOLERANCE)


@pytest.fixture(scope="module")
def scores(patched: Stack, models: dict[str, Path]) -> dict[str, Any]:
    return patched.score([models[name] for name in CASES])


@pytest.mark.parametrize("case", CASES)
def test_the_patched_stack_agrees_with_transformers(scores: dict[str, Any], case: str) -> None:
    assert agrees(scores[case], case), scores[case]


@pytest.fixture(scope="module")
def quantized_scores(patched: Stack, models: dict[str, Path]) -> dict[str, Any]:
    return patched.score([models[name] for name in CASES], QUANTIZED)


@pytest.mark.parametrize("case", CASES)
def test_quantized_layers_agree_with_transformers(quantized_scores: dict[str, Any], case: str) -> None:
    result = quantized_scores[case]
    if CASES[case]["mix"] == "legacy_types":
        wanted = r"blk\.\d\.ffn_gate_exps\.weight \(Q4_0\) and blk\.\d\.ffn_up_exps\.weight \(Q5_1\): one kernel"
        assert re.search(wanted, result.get("error", "no error")), result
    else:
        assert agrees(result, case), result


@pytest.mark.parametrize("layers", [{}, QUANTIZED], ids=["dequantized", "quantized"])
def test_two_ranks_answer_as_one(patched: Stack, models: dict[str, Path], layers: dict[str, Any]) -> None:
    one = patched.score([models[PROBE]], {**layers, "save_as": "one_rank.npz"})[PROBE]
    assert agrees(one), one
    options = {**layers, "tensor_parallel_size": 2, "reference": "one_rank.npz"}
    two = patched.score([models[PROBE]], options, VLLM_CPU_OMP_THREADS_BIND="nobind")[PROBE]
    assert two.get("same_tokens") and two["difference"] < RANK_TOLERANCE, two


def test_a_draft_does_not_change_the_answer(patched: Stack, models: dict[str, Path]) -> None:
    options = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"},
        **QUANTIZED,
    }
    result = patched.score([models[PROBE]], options)[PROBE]
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
        left_out = set(mutation.get("take_out", ()))
        edits = [overlay.Edit(**mutation["edit"])] if "edit" in mutation else []
        with altered(python, series, folder / name, left_out, edits) as stack:
            model = mutation.get("model", PROBE)
            environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            return stack.score([models[model]], mutation.get("options"), **environment)[model]

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
        assert result["llama_cpp"] > MARGIN * TOLERANCE, result
        assert result["llama_cpp_quantized"] > MEAN_TOLERANCE, result
    else:
        assert re.search(wanted, result.get("error", "no error")), result


def test_every_patch_with_a_cpu_proof_is_taken_out(series: patches.Series) -> None:
    taken_out = {file for mutation in MUTATIONS.values() for file in mutation.get("take_out", ())}
    wanted = {patch.file for patch in series.patches if patch.proof == "cpu"}
    assert wanted - taken_out == SHOWN_IN_PARTS
    assert taken_out <= {patch.file for patch in series.patches}
