"""`make bench-gpu` says why it does not run, and runs what the card can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu/bench.py"
#: Answers for the interpreter of a CUDA stack: its card, or a record where a script is to write one.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then echo {capability}; else echo "$4" >"$2"; exit {code}; fi
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def bench(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it with no program on the path but those in the folder."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "out")],
        env={"PATH": str(folder), "OCTOSERVE_COMMIT": "0123abcd", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """A folder with an nvidia-smi that shows one card."""
    program(tmp_path / "nvidia-smi", '#!/bin/sh\necho "A card, 590.48.01, 97887 MiB"\n')
    return tmp_path


def test_without_a_card_it_says_so_and_is_no_failure(tmp_path: Path) -> None:
    done = bench(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no card: GPU part not run")
    assert not (tmp_path / "out").exists()


def test_with_a_card_and_no_stack_it_says_how_to_make_one(card: Path) -> None:
    done = bench(card)
    assert done.returncode == 1
    assert "scripts/stack_venv.py vllm-0.32.0 cuda .cache/stacks/vllm-0.32.0-cuda" in done.stdout


def test_an_interpreter_without_torch_is_named(card: Path) -> None:
    python = program(card / "python", "#!/bin/sh\necho \"No module named 'torch'\" >&2; exit 1\n")
    done = bench(card, OCTOSERVE_CUDA_PYTHON=str(python))
    assert done.returncode == 1
    assert f"OCTOSERVE_CUDA_PYTHON={python}" in done.stdout and "No module named 'torch'" in done.stdout


@pytest.mark.parametrize(
    ("capability", "code", "records"),
    [
        (9, 0, ["triton_indexer.json", "triton_mla_sparse.json", "triton_mla_sparse_beside.json"]),
        (12, 0, ["triton_indexer.json", "triton_mla_sparse.json"]),
        (12, 1, ["triton_indexer.json", "triton_mla_sparse.json"]),
    ],
)
def test_it_runs_what_the_card_can(card: Path, capability: int, code: int, records: list[str]) -> None:
    python = program(card / "python", PYTHON.format(capability=capability, code=code))
    done = bench(card, OCTOSERVE_CUDA_PYTHON=str(python))
    assert done.returncode == code, done.stdout + done.stderr
    assert sorted(path.name for path in (card / "out").iterdir()) == records
    assert {path.read_text().strip() for path in (card / "out").iterdir()} == {"0123abcd"}
    assert ("not run, its other kernels need SM9x, this card is SM12x" in done.stdout) == (capability == 12)
    assert ("triton_mla_sparse: FAILED" in done.stdout) == (code == 1)
