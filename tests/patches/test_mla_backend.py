"""The backend TRITON_MLA_SPARSE on the CPU: from logical indices and page tables to the answer."""

from __future__ import annotations

import json
from pathlib import Path

import overlay
import pytest
from conftest import Stack, altered
from octoserve import patches

BACKEND = "vllm/v1/attention/backends/mla/triton_mla_sparse.py"
BOUND = 2**-11  # of float16, see sparse_kernel.py


def distances(stack: Stack) -> dict[str, float]:
    done = stack.run("check_mla_backend.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_decode_speculative_decode_and_prefill_are_answered_as_in_float64(patched: Stack) -> None:
    found = distances(patched)
    assert sorted(found) == ["decode", "prefill", "speculative"]
    assert max(found.values()) < BOUND, found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("BLOCK_STRIDE_ROWS=block_stride_rows", "BLOCK_STRIDE_ROWS=attn_metadata.block_size"),
        ("            out,\n            valid_counts", "            torch.empty_like(out),\n            valid_counts"),
    ],
    ids=["pages of other layers in between", "another tensor than the one returned"],
)
def test_a_fault_of_the_backend_shows(python: str, series: patches.Series, tmp_path: Path, old: str, new: str) -> None:
    with altered(python, series, tmp_path / "site", set(), [overlay.Edit(BACKEND, old, new)]) as stack:
        assert max(distances(stack).values()) > BOUND
