"""Clocks and temperatures against the NVML stub: the real nvidia-ml-py runs, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from octoserve import gpu_clocks
from test_nvml import EIGHT_CARDS, ROOT, compile_stub

DRIVER = """
import json, time
from octoserve import gpu_clocks
with gpu_clocks.Sampler(0.01) as sampler:
    time.sleep(0.1)
print(json.dumps({"gpus": sampler.gpus, "reason": sampler.reason}))
"""


@pytest.fixture(scope="module")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_stub(tmp_path_factory.mktemp("nvml_stub"))


def sample(folder: Path, state: str, library: Path | None) -> dict[str, Any]:
    path = folder / "state"
    path.write_text(state)
    environment = {**os.environ, "OCTOSERVE_NVML_STUB": str(path), "PYTHONPATH": str(ROOT / "module_utils")}
    if library:
        environment["LD_LIBRARY_PATH"] = str(library)
    done = subprocess.run([sys.executable, "-c", DRIVER], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_the_sensors_say(tmp_path: Path, stub_library: Path) -> None:
    state = EIGHT_CARDS + "clocks * 2410 14001\ncelsius 3 71\nmilliwatts 3 412500\nthrottle 3 25\n"
    found = sample(tmp_path, state, stub_library)
    assert [gpu["index"] for gpu in found["gpus"]] == list(range(8))
    assert found["reason"] == ""
    gpu = found["gpus"][3]
    assert gpu["sm_clock_mhz"] == {"min": 2410, "mean": 2410, "max": 2410}
    assert gpu["memory_clock_mhz"]["mean"] == 14001
    assert gpu["temperature_c"]["max"] == 71
    assert gpu["power_w"]["mean"] == 412.5
    assert gpu["throttle_reasons"] == ["power cap", "software thermal slowdown"]
    assert found["gpus"][0]["throttle_reasons"] == []


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("cards 0\n", "NVML shows no card"),
        ("init_result 18\n", "come from different drivers"),
        (EIGHT_CARDS + "result 5 15\n", "a card stopped answering"),
    ],
)
def test_without_sensors_the_reason_is_said(tmp_path: Path, stub_library: Path, state: str, reason: str) -> None:
    found = sample(tmp_path, state, stub_library)
    assert reason in found["reason"]


def test_a_value_that_a_card_does_not_offer_is_none_and_the_others_stay() -> None:
    told = {"sm_clock_mhz": 2000, "memory_clock_mhz": None, "temperature_c": 60, "power_w": 100000, "reasons": 0}
    later = {**told, "sm_clock_mhz": 2200, "reasons": 0x08}
    found = gpu_clocks.summarize([told, later])
    assert found["memory_clock_mhz"] is None
    assert found["sm_clock_mhz"] == {"min": 2000, "mean": 2100, "max": 2200}
    assert found["throttle_reasons"] == ["hardware slowdown"]
