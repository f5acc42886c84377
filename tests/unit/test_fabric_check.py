"""The fabric check without torch: ranks, bounds, what is said. With torch on the CPU: tests/gates/test_fabric.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from octoserve import fabric_check
from octoserve.fabric_check import FabricError

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/fixtures/fake_engine"


def run(folder: Path, fault: str = "", *options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """As the role calls it, with a stand-in for torch; ``before`` runs in each rank before it."""
    (folder / "sitecustomize.py").write_text(f"import sys, time\nif '--rank=1' in sys.argv:\n    {before or 'pass'}\n")
    (folder / "torch.py").write_text((STAND_IN / "torch.py").read_text())
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'module_utils'}", "FAKE_ENGINE_FABRIC": fault}
    command = [sys.executable, "-m", "octoserve.fabric_check", "--ranks=3", "--timeout=30", "--setup=30", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_three_ranks_reduce(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [size["bytes"] for size in result["sizes"]] == list(fabric_check.SIZES)
    assert "all-reduce over 3 ranks (nccl): 16 KiB in" in result["line"]


def test_what_a_rank_says_at_its_end_is_not_its_result(tmp_path: Path) -> None:
    """A warning of torch, a line of NCCL_DEBUG: a good fabric rolled a good deploy back."""
    done = run(tmp_path, before="import atexit; atexit.register(print, 'NCCL INFO comm destroyed')")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("wrong", "rank 1 of 3: ValueError: 4096 of 4096 values of an all-reduce of 16384 bytes are wrong"),
        ("hangs", "not done within 2 s of the ranks' meeting: "),
    ],
)
def test_a_bad_fabric_is_named(tmp_path: Path, fault: str, wanted: str) -> None:
    done = run(tmp_path, fault, "--timeout=2")
    assert done.returncode == 1
    assert wanted in done.stderr
    assert "NCCL_P2P_DISABLE" in done.stderr
    assert done.stderr.count("\n") == 1, "the play shows one line"


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("time.sleep(60)", ["not done within 5 s: ", "rank 1 in its start"]),
        ("sys.modules['torch'] = None", ["rank 1 of 3: ModuleNotFoundError: import of torch"]),
    ],
    ids=["a slow start", "no torch"],
)
def test_what_fails_before_the_ranks_meet_is_no_fault_of_the_fabric(
    tmp_path: Path, before: str, wanted: list[str]
) -> None:
    done = run(tmp_path, "", "--setup=5" if "sleep" in before else "--setup=60", before=before)
    assert done.returncode == 1
    assert [words for words in wanted if words not in done.stderr] == []
    assert "no card has sent anything yet" in done.stderr
    assert "NCCL_P2P_DISABLE" not in done.stderr


class Stuck:
    """A process that hangs in the driver: SIGKILL does not end it, and whoever waits for it hangs too."""

    def __init__(self, *_command: Any, **_options: Any) -> None: ...

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> None:
        pytest.fail("it waits for what does not end")


def test_a_rank_that_nothing_ends_is_named_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Stuck)
    with pytest.raises(FabricError, match=r"not done within 0.2 s: rank 0 in its start, rank 1 in its start"):
        fabric_check.check(2, "nccl", 30, setup_s=0.2)


def test_the_slowest_rank_counts() -> None:
    results = [{"rounds": {"1024": [1e-3, 2e-3, 3e-3]}}, {"rounds": {"1024": [2e-3, 2e-3, 4e-3]}}]
    found = fabric_check.together(results, 2, "nccl", 5.0)["sizes"]
    assert found == [{"bytes": 1024, "median_us": 2000.0, "bus_gb_s": 0.0}]
