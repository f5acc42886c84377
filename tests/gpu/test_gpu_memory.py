"""gpu_memory on a real driver: facts against nvidia-smi, a holder that is named, and the time after SIGKILL.

Needs an NVIDIA driver and nothing else: the holder allocates through libcuda, without torch. Run by `make test-gpu`.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from octoserve import nvml

# Takes a share of card 0, prints what CUDA says before and after as JSON, then holds on until it is killed.
HOLDER = """
import ctypes, json, sys, time
cuda = ctypes.CDLL("libcuda.so.1")

def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, f"{name} returned {result}"

def memory():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return {"free": free.value, "total": total.value}

device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
before = memory()
size = int(before["total"] * float(sys.argv[1]))
call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
print(json.dumps({"before": before, "after": memory(), "size": size}), flush=True)
time.sleep(300)
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process that holds 0.8 of card 0, and what CUDA told it."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, "0.8"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the holder died before it had its memory"
        yield process, json.loads(line)
        process.kill()


def test_facts_agree_with_nvidia_smi() -> None:
    fields = "index,uuid,name,pci.bus_id,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max"
    told = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    with nvml.session() as read:
        gpus = read()
    assert gpus.cards
    for row, card in zip(told.strip().splitlines(), gpus.cards, strict=True):
        index, uuid, name, address, total, driver, generation, width = (part.strip() for part in row.split(","))
        assert (card.index, card.uuid, card.name, card.pci_bus_id) == (int(index), uuid, name, address)
        assert card.memory_total // 1024**2 == int(total)
        assert gpus.driver_version == driver
        link = (card.pcie.max_generation, card.pcie.max_width)
        assert [str(value) for value in link] == [generation, width] or link == (None, None), (link, row)
    print(json.dumps({"container": gpus.container, "card": str(gpus.cards[0])}, indent=1))


def test_a_holder_is_named_and_its_memory_comes_back_after_sigkill(
    holder: tuple[subprocess.Popen[str], dict[str, Any]],
) -> None:
    process, cuda = holder
    with nvml.session() as read:
        with pytest.raises(nvml.GpuError) as caught:
            nvml.wait_until_free(read, 0.95, 0.5)
        assert caught.value.problem == nvml.MEMORY_NOT_FREE
        assert "\n" not in str(caught.value)
        card = read().cards[0]
        assert card.memory_free <= cuda["after"]["free"], "NVML and CUDA disagree about free memory"
        if card.processes:
            own = next(item for item in card.processes if item.pid == process.pid)
            assert own.user == pwd.getpwuid(os.getuid()).pw_name
            assert own.memory_used is None or own.memory_used >= cuda["size"]
            assert own.command is not None
            assert own.command.startswith(sys.executable)
        else:
            assert not card.processes_visible, "memory is held, and an empty list is taken for the truth"

        start = time.monotonic()
        process.send_signal(signal.SIGKILL)
        free = nvml.wait_until_free(read, 0.95, 60, interval_s=nvml.POLL_MIN_S)
        seconds = time.monotonic() - start
        # A card that just passes must pass vLLM's own check too, which CUDA answers with a context already open.
        context = free.cards[0].memory_free - cuda["before"]["free"]
        assert nvml.required_free(free.cards[0], 0.95) - context >= 0.95 * cuda["before"]["total"]
    print(
        json.dumps(
            {
                "message": str(caught.value),
                "seconds_after_sigkill": round(seconds, 2),
                "nvml": {"total": card.memory_total, "free_idle": free.cards[0].memory_free},
                "cuda_with_a_context": cuda["before"],
            },
            indent=1,
        )
    )
