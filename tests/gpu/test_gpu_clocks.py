"""Clocks, temperature and power of real cards, beside nvidia-smi. Run by `make test-gpu`."""

from __future__ import annotations

import json
import subprocess
import time

from octoserve import gpu_clocks

# How far a card at rest moves between two readings.
MHZ, CELSIUS, WATT = 1000, 5, 60


def test_the_sensors_agree_with_nvidia_smi() -> None:
    with gpu_clocks.Sampler(0.1) as sampler:
        time.sleep(1)
        fields = "index,name,clocks.sm,clocks.mem,temperature.gpu,power.draw"
        told = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    assert sampler.reason == ""
    assert sampler.gpus
    for row, gpu in zip(told.strip().splitlines(), sampler.gpus, strict=True):
        index, name, sm, memory, temperature, power = (part.strip() for part in row.split(","))
        assert (gpu["index"], gpu["name"]) == (int(index), name)
        assert abs(gpu["sm_clock_mhz"]["mean"] - int(sm)) <= MHZ
        assert abs(gpu["memory_clock_mhz"]["mean"] - int(memory)) <= MHZ
        assert abs(gpu["temperature_c"]["mean"] - int(temperature)) <= CELSIUS
        assert abs(gpu["power_w"]["mean"] - float(power)) <= WATT
    print(json.dumps(sampler.gpus[0], indent=1))
