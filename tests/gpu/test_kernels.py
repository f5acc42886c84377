"""The Triton kernels of the series on a card: answers, CUDA graphs and torch.compile. `make bench-gpu` measures speed.

Needs a card and OCTOSERVE_CUDA_PYTHON, an interpreter with torch for CUDA and Triton; a skip says which is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("OCTOSERVE_CUDA_PYTHON", "")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("triton_mla_sparse", "numbers"),
        ("triton_mla_sparse", "graphs"),
        ("triton_mla_sparse", "compiled"),
        ("triton_indexer", "numbers"),
        ("triton_indexer", "graphs"),
    ],
)
def test_a_kernel_on_a_card(name: str, part: str, tmp_path: Path) -> None:
    if not PYTHON:
        pytest.skip("OCTOSERVE_CUDA_PYTHON is not set, wanted an interpreter with torch for CUDA and Triton")
    code = "import torch, triton; assert torch.cuda.is_available(), 'found no card'"
    ready = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    if ready.returncode:
        pytest.skip(f"{PYTHON}: {ready.stderr.strip().splitlines()[-1:]}")
    record = tmp_path / "record.json"
    script = Path(__file__).with_name(f"{name}.py")
    done = subprocess.run(
        [PYTHON, str(script), str(record), "--part", part], capture_output=True, text=True, check=False
    )
    assert record.exists(), done.stderr[-3000:]
    assert json.loads(record.read_text(encoding="utf-8"))["failures"] == []
