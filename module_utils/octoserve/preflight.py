"""What preflight looks at before an hour of loading: each finding with what was measured and how to mend it.

No torch and no CUDA context; what cannot be read from here is "cannot see", never "ok". The subjects are in
preflight_*.py, one file each.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from . import gpu_settings, nvml, preflight_build, preflight_disk, preflight_driver, preflight_gpu, preflight_host
from . import preflight_pci as pci
from .finding import CANNOT_SEE, ERROR, OK, WARNING, Finding, Host, line
from .preflight_gpu import WantedGpus


@dataclass(frozen=True)
class Wanted:
    """What the deploy needs. `gpus` None leaves everything about cards out; `cuda` is the stack's, such as 13.0."""

    gpus: WantedGpus | None
    cuda: str | None
    python: str
    python_version: str | None
    model: preflight_disk.Model
    needs: tuple[preflight_disk.Need, ...]
    start_timeout_s: float
    address: str
    port: int
    unit: str
    gives_way: str
    controller_time: float | None


def look(wanted: Wanted, host: Host, *, may_write: bool) -> list[Finding]:
    """All findings, in the order of reading: cards, driver, the way between them, what compiles, the host, disks.

    `may_write` allows a temporary file to measure a disk that holds no large file yet.
    """
    size = wanted.model.size()
    found = _of_cards(wanted.gpus, wanted.cuda, host, size) if wanted.gpus else []
    found += [
        preflight_build.python(wanted.python, wanted.python_version),
        preflight_build.headers(wanted.python),
        preflight_build.compiler(),
    ]
    if wanted.gpus:
        found += [preflight_build.nvcc(wanted.cuda), preflight_host.memlock(host)]
    ahead_s = None if wanted.controller_time is None else time.time() - wanted.controller_time
    return [
        *found,
        preflight_host.shared_memory(host),
        preflight_host.page_cache(host, size),
        preflight_host.clock(preflight_host.clock_status(), ahead_s),
        preflight_host.address(wanted.address, wanted.port, wanted.unit, wanted.gives_way),
        *preflight_disk.room([*wanted.model.needs(), *wanted.needs]),
        preflight_disk.speed(wanted.model, wanted.start_timeout_s, may_write=may_write),
    ]


def counts(findings: Iterable[Finding]) -> str:
    """Such as "3 errors, 1 warning, 2 cannot be seen, 20 ok"."""
    number = dict.fromkeys((ERROR, WARNING, CANNOT_SEE, OK), 0)
    for finding in findings:
        number[finding.verdict] += 1
    return (
        f"{number[ERROR]} error{'' if number[ERROR] == 1 else 's'}, "
        f"{number[WARNING]} warning{'' if number[WARNING] == 1 else 's'}, "
        f"{number[CANNOT_SEE]} cannot be seen, {number[OK]} ok"
    )


def problems(findings: Iterable[Finding]) -> list[str]:
    """A line for each error."""
    return [line(finding) for finding in findings if finding.verdict == ERROR]


def _cards_and_settings() -> tuple[nvml.Gpus, gpu_settings.Details]:
    gpus = nvml.read_gpus()
    return gpus, gpu_settings.read(len(gpus.cards))


def _of_cards(wanted: WantedGpus, cuda: str | None, host: Host, model_bytes: int | None) -> list[Finding]:
    try:
        with nvml.reading(_cards_and_settings) as read:
            gpus, details = read()
    except nvml.GpuError as error:
        return [
            *preflight_gpu.not_visible(error),
            preflight_driver.kernel_module(None, host),
            preflight_driver.packages(host),
            *(
                Finding(name, CANNOT_SEE, "NVML gives no cards", "readable through NVML and /sys", "mend GPUs first")
                for name in ("PCIe link", "IOMMU", "ACS", "NUMA")
            ),
        ]
    return [
        *preflight_gpu.findings(gpus, details, wanted, model_bytes),
        preflight_driver.versions(gpus, host),
        *([preflight_driver.cuda(gpus, cuda)] if cuda else []),
        preflight_driver.kernel_module(details.cards, host),
        preflight_driver.packages(host),
        *pci.findings(gpus.cards, host),
    ]
