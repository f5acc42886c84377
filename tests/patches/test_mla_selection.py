"""Which attention backend a sparse MLA model gets on which architecture, and why not another one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Stack

NAME = "TRITON_MLA_SPARSE"
CLASS = "vllm.v1.attention.backends.mla.triton_mla_sparse.TritonMLASparseBackend"
QUESTIONS: dict[str, dict[str, Any]] = {
    "sm120": {"capability": [12, 0], "kv_cache_dtype": "auto", "flashinfer": True},
    "sm120_bfloat16": {"capability": [12, 0], "kv_cache_dtype": "bfloat16"},
    "sm120_packed": {"capability": [12, 0], "kv_cache_dtype": "fp8_ds_mla", "flashinfer": True},
    "sm120_fp8": {"capability": [12, 0], "kv_cache_dtype": "fp8"},
    "sm120_blocks_of_16": {"capability": [12, 0], "kv_cache_dtype": "auto", "block_size": 16},
    "sm120_blocks_of_8": {"capability": [12, 0], "kv_cache_dtype": "auto", "block_size": 8},
    "sm120_other_type": {"capability": [12, 0], "kv_cache_dtype": "float16"},
    "sm120_short_index": {"capability": [12, 0], "kv_cache_dtype": "auto", "config": {"index_topk": 100}},
    "sm120_other_rank": {"capability": [12, 0], "kv_cache_dtype": "auto", "config": {"kv_lora_rank": 256}},
    "sm120_without_rope": {"capability": [12, 0], "kv_cache_dtype": "auto", "head_size": 512},
    "sm80": {"capability": [8, 0], "kv_cache_dtype": "auto"},
    "sm86": {"capability": [8, 6], "kv_cache_dtype": "auto", "dtype": "float16"},
    "sm89": {"capability": [8, 9], "kv_cache_dtype": "bfloat16"},
    "sm90": {"capability": [9, 0], "kv_cache_dtype": "auto"},
    "sm100": {"capability": [10, 0], "kv_cache_dtype": "auto"},
    "sm75": {"capability": [7, 5], "kv_cache_dtype": "auto", "dtype": "float16"},
}


@pytest.fixture(scope="module")
def found(patched: Stack) -> dict[str, Any]:
    done = patched.run("check_mla_selection.py", json.dumps(list(QUESTIONS.values())))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(QUESTIONS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(
    "name", ["sm120", "sm120_bfloat16", "sm120_blocks_of_16", "sm120_without_rope", "sm80", "sm86", "sm89"]
)
def test_it_is_chosen_where_nothing_else_serves_a_16_bit_cache(found: dict[str, Any], name: str) -> None:
    assert found[name]["chosen"] == CLASS


@pytest.mark.parametrize("name", ["sm90", "sm100"])
def test_kernels_made_for_the_architecture_come_first(found: dict[str, Any], name: str) -> None:
    assert found[name]["priorities"][-1] == NAME
    assert NAME in found[name]["valid"]


def test_the_packed_cache_stays_with_flashinfer(found: dict[str, Any]) -> None:
    assert found["sm120"]["valid"] == [NAME, "FLASHINFER_MLA_SPARSE_SM120"]
    assert found["sm120_packed"]["valid"] == ["FLASHINFER_MLA_SPARSE_SM120"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sm120_packed", "reads a 16-bit KV cache, not fp8_ds_mla: set --kv-cache-dtype to auto, bfloat16 or float16"),
        ("sm120_blocks_of_8", "block_size not supported"),
        ("sm120_other_type", "needs queries and KV cache of one type, not torch.bfloat16 and float16"),
        ("sm120_short_index", "requires index_topk to be a multiple of 128, got 100"),
        ("sm120_other_rank", "requires kv_lora_rank=512, got 256"),
        ("sm75", "compute capability not supported"),
    ],
)
def test_it_says_why_it_is_passed_over(found: dict[str, Any], name: str, reason: str) -> None:
    assert reason in ", ".join(found[name]["reasons"][NAME])


def test_an_fp8_cache_that_nothing_serves_is_an_error_that_names_what_does(found: dict[str, Any]) -> None:
    message = found["sm120_fp8"]["chosen"]
    assert message.startswith("No valid attention backend found")
    assert "TRITON_MLA_SPARSE reads a 16-bit KV cache, not fp8: set --kv-cache-dtype to auto" in message
