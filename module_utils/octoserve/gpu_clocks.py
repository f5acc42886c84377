"""Clocks, temperatures, power and throttle reasons of the cards while something is measured, through NVML."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from . import nvml

try:
    import pynvml
except ImportError:  # said by nvml.opened()
    pynvml = None

INTERVAL_S = 0.5
PATIENCE_S = 10.0  # a call to a card that fell off the bus may hang
# Bits of NVML's clocks event reasons (nvml.h, nvmlClocksEventReasons) that slow a card down.
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Sampler:
    """``with Sampler() as sampler``: samples until the block ends; then ``gpus`` holds what was seen of each card.

    ``gpus`` is None where there is no card to be seen or none answered, and ``reason`` says why. Nothing here raises:
    a gate goes on without it.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.gpus: list[dict[str, Any]] | None = None
        self.reason = ""
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-clocks", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self.reason = f"a card gave no answer within {PATIENCE_S:g} s"

    def _run(self) -> None:
        samples: dict[int, list[dict[str, int | None]]] = {}
        names: dict[int, str] = {}
        try:
            with nvml.opened():
                while not samples or not self._stop.wait(self._interval_s):
                    for index in range(pynvml.nvmlDeviceGetCount()):
                        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                        names[index] = pynvml.nvmlDeviceGetName(handle)
                        samples.setdefault(index, []).append(_sample(handle))
                    if not samples:
                        self.reason = "NVML shows no card"
                        return
        except nvml.GpuError as error:
            self.reason = str(error)
        except pynvml.NVMLError as error:
            self.reason = f"a card stopped answering: {error}"
        if samples:
            self.gpus = [{"index": index, "name": names[index], **summarize(samples[index])} for index in samples]


def summarize(samples: Sequence[dict[str, int | None]]) -> dict[str, Any]:
    """``min``, ``mean``, ``max`` of each value over a card's samples (None where never told), and the reasons."""
    found: dict[str, Any] = {}
    for name, divisor in (("sm_clock_mhz", 1), ("memory_clock_mhz", 1), ("temperature_c", 1), ("power_w", 1000)):
        values = [value / divisor for sample in samples if (value := sample[name]) is not None]
        found[name] = {"min": min(values), "mean": statistics.fmean(values), "max": max(values)} if values else None
    seen = 0
    for sample in samples:
        seen |= sample["reasons"] or 0
    found["throttle_reasons"] = [text for bit, text in THROTTLE_REASONS.items() if seen & bit]
    return found


def _sample(handle: Any) -> dict[str, int | None]:
    """One reading of one card; power in milliwatts as NVML gives it."""
    return {
        "sm_clock_mhz": nvml.offered(lambda card: pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM), handle),
        "memory_clock_mhz": nvml.offered(
            lambda card: pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM), handle
        ),
        "temperature_c": nvml.offered(
            lambda card: pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU), handle
        ),
        "power_w": nvml.offered(pynvml.nvmlDeviceGetPowerUsage, handle),
        "reasons": nvml.offered(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
    }
