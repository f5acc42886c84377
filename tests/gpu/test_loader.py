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

DOCUMENT = loader_proof.load_document()
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
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every case came to; all run once, beside each other."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("loader")
    here = Path(__file__).parent
    subprocess.run([PYTHON, str(here / "loader_models.py"), str(folder / "models")], check=True)
    command = [sys.executable, str(here / "loader_proof.py"), str(folder / "models"), str(folder), "--python", PYTHON]
    subprocess.run(command, check=False)
    record: dict[str, Any] = json.loads((folder / "loader_proof.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = record["results"]
    return found


@pytest.mark.parametrize("case", loader_proof.load_cases(DOCUMENT), ids=lambda case: case.name)
def test_the_loader_on_cards(results: dict[str, Any], case: loader_proof.Case) -> None:
    cards = len(loader_proof.cards_here())
    if case.ranks > cards:
        pytest.skip(f"needs {case.ranks} cards, found {cards}")
    assert results[case.name]["verdict"] == "ok", results[case.name]
