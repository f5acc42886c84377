"""The fabric check with real torch, over gloo on the CPU: wrong values, a hang, a slow start, a dead rank are named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.gates.serving import PYTHON, ROOT

#: Runs in each rank before the check: spoils what rank 1 of the ranks gets from an all-reduce.
SPOILED = """
import sys, time
if "--rank=1" in sys.argv:
    from torch import distributed
    real = distributed.all_reduce
    def all_reduce(values, *arguments, **options):
        real(values, *arguments, **options)
        {fault}
    distributed.all_reduce = all_reduce
"""


#: The same, before its torch is loaded; and at its end, when torch and NCCL may still say something.
SLOW = """
import sys, time
if "--rank=1" in sys.argv:
    time.sleep(600)
"""
TALKATIVE = """
import atexit, sys
if "--rank=1" in sys.argv:
    atexit.register(print, "[W1201 ProcessGroup.cpp:1] Warning: something after the result", flush=True)
"""


def check(folder: Path, fault: str, timeout_s: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it over three ranks, one of which is spoiled."""
    code = fault if fault in (SLOW, TALKATIVE) else SPOILED.format(fault=fault) if fault else ""
    (folder / "sitecustomize.py").write_text(code)
    command = [str(PYTHON), "-m", "octoserve.fabric_check", "--ranks=3", "--backend=gloo", f"--timeout={timeout_s}"]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'module_utils'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *options, "--sizes", "4096", "262144"], capture_output=True, text=True, check=False, env=environment
    )


def test_a_good_fabric_passes_and_is_measured(tmp_path: Path) -> None:
    done = check(tmp_path, "", 60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ok"], result["ranks"], [size["bytes"] for size in result["sizes"]]) == (True, 3, [4096, 262144])
    assert all(size["median_us"] > 0 for size in result["sizes"])
    assert "every value right" in result["line"]


def test_what_a_rank_says_at_its_end_is_not_its_result(tmp_path: Path) -> None:
    done = check(tmp_path, TALKATIVE, 60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]


def test_a_rank_that_does_not_get_as_far_as_the_fabric_is_no_fault_of_the_fabric(tmp_path: Path) -> None:
    done = check(tmp_path, SLOW, 1, "--setup=8")
    assert done.returncode == 1
    assert "not done within 8 s: " in done.stderr
    assert "rank 1 in its start" in done.stderr
    assert "NCCL_P2P_DISABLE" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "timeout_s", "wanted"),
    [
        ("values[7] += 1", 60, "ValueError: 1 of 1024 values of an all-reduce of 4096 bytes are wrong"),
        ("time.sleep(600)", 15, "rank 1 in all-reduce 1 of 4096 bytes"),
        ("sys.exit('no kernel image')", 60, "rank 1 of 3: no kernel image"),
    ],
    ids=["a wrong value", "a hang", "a dead rank"],
)
def test_a_bad_one_is_named(tmp_path: Path, fault: str, timeout_s: int, wanted: str) -> None:
    done = check(tmp_path, fault, timeout_s)
    assert done.returncode == 1
    assert wanted in done.stderr
    assert "NCCL_P2P_DISABLE" in done.stderr
