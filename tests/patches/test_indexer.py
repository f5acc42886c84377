"""Whose kernels the indexer takes on which machine, and that Triton's choose the keys that float64 does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import overlay
import pytest
from conftest import Stack, altered
from octoserve import patches

LAYER = "vllm/model_executor/layers/sparse_attn_indexer.py"
DEEP_GEMM = "vllm/utils/deep_gemm.py"
HERE = {"deep_gemm": True, "nvcc": "12.9"}
FORCED = {**HERE, "environment": {"VLLM_SPARSE_INDEXER_TRITON": "1"}}
#: Machines by name, and the reason for Triton; None where DeepGEMM computes the logits.
MACHINES: dict[str, tuple[dict[str, Any], str | None]] = {
    "sm120": ({"capability": [12, 0], **HERE}, None),
    "sm120_without_deep_gemm": ({"capability": [12, 0], "nvcc": "13.0"}, "DeepGEMM is not installed"),
    "sm120_without_nvcc": (
        {"capability": [12, 0], "deep_gemm": True},
        "DeepGEMM compiles with nvcc, which CUDA_HOME and PATH do not have",
    ),
    "sm120_with_an_old_nvcc": (
        {"capability": [12, 0], "deep_gemm": True, "nvcc": "12.8"},
        "DeepGEMM compiles with nvcc 12.9 or newer, /nvcc is 12.8",
    ),
    "sm90": ({"capability": [9, 0], **HERE}, None),
    # As released, this variable does not reach the indexer.
    "sm90_without_deep_gemm_s_products": (
        {"capability": [9, 0], **HERE, "environment": {"VLLM_USE_DEEP_GEMM": "0"}},
        None,
    ),
    "sm90_forced": ({"capability": [9, 0], **FORCED}, "VLLM_SPARSE_INDEXER_TRITON is 1"),
    "sm100_forced": ({"capability": [10, 0], **FORCED}, "VLLM_SPARSE_INDEXER_TRITON is 1"),
    "sm80": ({"capability": [8, 0], **HERE}, "DeepGEMM has no kernels for this GPU"),
    "sm89": ({"capability": [8, 9], **HERE}, "DeepGEMM has no kernels for this GPU"),
}
TRITON = [name for name, (_, reason) in MACHINES.items() if reason]


def ask(stack: Stack, machines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = stack.run("check_indexer.py", json.dumps(machines), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def found(patched: Stack) -> dict[str, Any]:
    """What each machine answers."""
    answers = ask(patched, [machine for machine, _ in MACHINES.values()])
    return dict(zip(MACHINES, answers, strict=True))


@pytest.mark.parametrize("name", MACHINES)
def test_one_line_says_whose_kernels_and_why(found: dict[str, Any], name: str) -> None:
    reason = MACHINES[name][1]
    whose = f"Triton ({reason})" if reason else "DeepGEMM"
    said = [re.sub(r"/tmp/\S+/nvcc", "/nvcc", line) for line in found[name]["log"]]
    assert said == [f"Sparse attention indexer: logits by {whose}"]
    assert found[name]["builder"]["schedule"] is (reason is None)


@pytest.mark.parametrize("name", TRITON)
def test_triton_s_logits_choose_the_right_keys(found: dict[str, Any], name: str) -> None:
    assert found[name]["ran"] == []
    assert found[name]["right"] == {"decode": True, "speculative": True, "prefill": True}


@pytest.mark.parametrize("name", ["sm90", "sm120"])
def test_deep_gemm_s_run_where_they_can(found: dict[str, Any], name: str) -> None:
    assert found[name]["ran"] == ["fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"]


def test_what_only_deep_gemm_s_kernels_do_is_not_asked_of_triton_s(found: dict[str, Any]) -> None:
    assert found["sm90"]["builder"]["native"] == [1, 2, 4]
    assert found["sm90"]["builder"]["flattened_device_lens"]
    for name in ("sm90_forced", "sm100_forced"):
        builder = found[name]["builder"]
        assert (builder["native"], builder["varlen"], builder["flattened_device_lens"]) == ([1, 2], False, False)


def test_a_cache_that_triton_does_not_read_is_refused(found: dict[str, Any]) -> None:
    assert found["sm90"]["fp4_error"] is None
    wanted = "The sparse attention indexer's MXFP4 cache requires DeepGEMM: VLLM_SPARSE_INDEXER_TRITON is 1"
    assert found["sm100_forced"]["fp4_error"] == wanted


CALL = "                seq_lens,\n                decode_metadata.{},\n                decode_metadata.schedule"
FAULTS = {
    "another tensor than the one returned": (
        DEEP_GEMM, "cu_seqlen_ks, cu_seqlen_ke, logits)", "cu_seqlen_ks, cu_seqlen_ke, logits.clone())", "prefill",
    ),
    "another request's pages": (LAYER, CALL.format("block_table"), CALL.format("block_table.flip(0)"), "decode"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_metadata_and_kernel_shows(
    python: str, series: patches.Series, tmp_path: Path, fault: str
) -> None:
    file, old, new, part = FAULTS[fault]
    with altered(python, series, tmp_path / "site", set(), [overlay.Edit(file, old, new)]) as stack:
        done = stack.run("check_indexer.py", json.dumps([{"capability": [12, 0]}]), TRITON_INTERPRET="1")
    assert done.returncode or not json.loads(done.stdout.splitlines()[-1])[0]["right"][part]
