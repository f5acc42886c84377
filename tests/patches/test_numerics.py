"""The patched stack answers as transformers does, and with a fault in it does not.

Both compute in float32, from the same dequantized weights; what is left is the order of sums. Measured: 7e-5
in log probability over every position and token. Each fault of mutations.yml moves the answer by 30 times the
tolerance or more, so that neither a slower machine's other kernels nor luck decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overlay
import pytest
import yaml
from conftest import HERE, Stack
from octoserve import patches

TOLERANCE = 1e-3
MARGIN = 30
CASES = list(yaml.safe_load((HERE / "cases.yml").read_text(encoding="utf-8")))
MUTATIONS: dict[str, Any] = yaml.safe_load((HERE / "mutations.yml").read_text(encoding="utf-8"))
PROBE = "glm5_unsloth_types_in_splits"


@pytest.fixture(scope="module")
def scores(patched: Stack, models: dict[str, Path]) -> dict[str, Any]:
    return patched.score(list(models.values()))


@pytest.mark.parametrize("case", CASES)
def test_the_patched_stack_agrees_with_transformers(scores: dict[str, Any], case: str) -> None:
    assert scores[case].get("difference", scores[case]) < TOLERANCE


def test_two_ranks_agree_with_transformers(patched: Stack, models: dict[str, Path]) -> None:
    options = {"tensor_parallel_size": 2}
    result = patched.score([models[PROBE]], options, VLLM_CPU_OMP_THREADS_BIND="nobind")[PROBE]
    assert result.get("difference", result) < TOLERANCE


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_seen(
    altered: Callable[[set[str], list[overlay.Edit]], Stack], models: dict[str, Path], name: str
) -> None:
    mutation = MUTATIONS[name]
    left_out = {mutation["take_out"]} if "take_out" in mutation else set()
    edits = [overlay.Edit(**mutation["edit"])] if "edit" in mutation else []
    result = altered(left_out, edits).score([models[PROBE]])[PROBE]
    if mutation["fails_with"] == "difference":
        assert result.get("difference", 0) > MARGIN * TOLERANCE, result
    else:
        assert re.search(mutation["fails_with"], result.get("error", "no error")), result


def test_every_patch_with_a_cpu_proof_is_taken_out_once(series: patches.Series) -> None:
    taken_out = sorted(mutation["take_out"] for mutation in MUTATIONS.values() if "take_out" in mutation)
    assert taken_out == sorted(patch.file for patch in series.patches if patch.proof == "cpu")
