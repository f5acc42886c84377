"""The patched loader on real cards: each case of loader.yml holds its bounds, and each fault breaks them.

Needs cards and OCTOSERVE_CUDA_PYTHON, the interpreter of an installed, unpatched CUDA stack; a skip says which is
missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu import loader_proof

HERE = Path(__file__).parent
FILES = ("loader.yml", "sparse.yml", "indexer.yml")
CASES = [(name, case) for name in FILES for case in loader_proof.load_cases(loader_proof.load_document(name))]
PYTHON = os.environ.get("OCTOSERVE_CUDA_PYTHON", "")


def missing() -> str | None:
    """What keeps the proof from running here."""
    if not loader_proof.cards_here():
        return "found no NVIDIA card: nvidia-smi does not answer"
    if not PYTHON:
        return "OCTOSERVE_CUDA_PYTHON is not set, wanted the interpreter of an installed, unpatched CUDA stack"
    code = "import torch, vllm_gguf_plugin; assert torch.version.cuda"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1:]
    return f"{PYTHON} has no CUDA stack: {last}" if done.returncode else None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of all files."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("loader") / "models"
    subprocess.run([PYTHON, str(HERE / "loader_models.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def results(models: Path) -> dict[str, Any]:
    """What every case came to; those of a file run once, beside each other."""
    found: dict[str, Any] = {}
    for name in FILES:
        out = models.with_name(name)
        command = [sys.executable, str(HERE / "loader_proof.py"), str(models), str(out), "--cases", name]
        subprocess.run([*command, "--python", PYTHON], check=False)
        found |= json.loads((out / "loader_proof.json").read_text(encoding="utf-8"))["results"]
    return found


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=lambda case: case.name)
def test_the_loader_on_cards(results: dict[str, Any], case: loader_proof.Case) -> None:
    cards = len(loader_proof.cards_here())
    if case.ranks > cards:
        pytest.skip(f"needs {case.ranks} cards, found {cards}")
    assert results[case.name]["verdict"] == "ok", results[case.name]


def test_a_slice_of_real_dimensions(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    command = [sys.executable, str(HERE / "real_slice.py"), str(tmp_path / "slice.json"), "--python", PYTHON]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
