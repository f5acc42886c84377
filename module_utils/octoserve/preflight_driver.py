"""Findings about the NVIDIA driver: its parts against each other, against the stack's CUDA, and against upgrades."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from . import nvml
from .finding import CANNOT_SEE, ERROR, OK, WARNING, Finding, Host, read, unless_hidden
from .gpu_settings import Settings

BLACKWELL = 10  # compute capability from which on only the open kernel module drives a card
PROC_VERSION = "proc/driver/nvidia/version"
_PACKAGE = re.compile(
    r"(cuda-drivers(-\d+)?|nvidia-(driver|open|dkms|kernel|headless|firmware|utils)\b.*|libnvidia-(compute|ml)\b.*)\Z"
)


def versions(gpus: nvml.Gpus, host: Host) -> Finding:
    """Driver, library and loaded kernel module are of one version."""
    found = {"driver": gpus.driver_version, "library": gpus.nvml_version.partition(".")[2]}
    module = nvml.kernel_module_version(read(host.root / PROC_VERSION) or "")
    if module:
        found["kernel module"] = module
    measured = ", ".join(f"{what} {version}" for what, version in found.items())
    wanted = "one version"
    if len(set(found.values())) == 1:
        return Finding("driver and library", OK, measured, wanted)
    mend = "reboot, since a driver upgrade takes effect only then; in a container, give it the host's library"
    return Finding("driver and library", ERROR, measured, wanted, mend)


def cuda(gpus: nvml.Gpus, wanted: str) -> Finding:
    """The newest CUDA that the driver serves, against the one that the stack is built on.

    An older minor version of the same major one runs what was compiled ahead of time, not PTX: "minor version
    compatibility" of https://docs.nvidia.com/deploy/cuda-compatibility/
    """
    measured = f"driver {gpus.driver_version} serves up to CUDA {gpus.cuda_version}"
    text = f"CUDA {wanted} or newer, which the stack is built on"
    if _numbers(gpus.cuda_version) >= _numbers(wanted):
        return Finding("CUDA of the driver", OK, measured, text)
    mend = f"install a driver that serves CUDA {wanted}, and reboot"
    same_major = _numbers(gpus.cuda_version)[:1] == _numbers(wanted)[:1]
    return Finding("CUDA of the driver", WARNING if same_major else ERROR, measured, text, mend)


def kernel_module(cards: Sequence[Settings] | None, host: Host) -> Finding:
    """Blackwell needs the open kernel module. `cards` is None where NVML shows none."""
    name, wanted = "kernel module", "the open one, which Blackwell needs"
    text = read(host.root / PROC_VERSION)
    if text is None:
        hidden = f" in {host.hidden_by}" if host.hidden_by else ""
        mend = "`modinfo -F license nvidia` on the machine itself says Dual MIT/GPL for the open one"
        return Finding(name, CANNOT_SEE, f"no /{PROC_VERSION}{hidden}", wanted, mend)
    version = nvml.kernel_module_version(text) or "of an unknown version"
    if "Open Kernel Module" in text:
        return Finding(name, OK, f"open, {version}", wanted)
    mend = "install the driver's open kernel module (package nvidia-open or nvidia-driver-NNN-server-open), and reboot"
    if cards is None or any(card.compute_capability is None for card in cards):
        return Finding(name, CANNOT_SEE, f"proprietary, {version}; the cards do not say what they are", wanted, mend)
    # It does not bring up a Blackwell card at all: a driver without cards is what that looks like.
    if not cards or any((card.compute_capability or (0, 0))[0] >= BLACKWELL for card in cards):
        return Finding(name, ERROR, f"proprietary, {version}", wanted, mend)
    return Finding(name, OK, f"proprietary, {version}; fine for these cards", wanted)


def packages(host: Host) -> Finding:
    """The driver's packages are held, so that no unattended upgrade swaps the library below a running service."""
    name, wanted = "driver packages", "held, or none"
    text = read(host.root / "var/lib/dpkg/status")
    if text is None:
        return Finding(name, CANNOT_SEE, "no /var/lib/dpkg/status", wanted, "hold them with your package manager")
    loose: list[str] = []
    held: list[str] = []
    for block in text.split("\n\n"):
        package = re.search(r"^Package: (\S+)$", block, re.MULTILINE)
        status = re.search(r"^Status: (\S+) \S+ installed$", block, re.MULTILINE)
        if package and status and _PACKAGE.match(package.group(1)):
            (held if status.group(1) == "hold" else loose).append(package.group(1))
    if loose:
        mend = f"`apt-mark hold {' '.join(sorted(loose))}`; an upgrade in between makes every start fail until a reboot"
        return Finding(name, WARNING, f"not held: {', '.join(sorted(loose))}", wanted, mend)
    if held:
        # A container's driver is the host's, whose packages are not here; a virtual machine has its own.
        return unless_hidden(
            Finding(name, OK, f"held: {', '.join(sorted(held))}", wanted), replace(host, virtual=False)
        )
    if host.container:
        return Finding(name, CANNOT_SEE, f"none in this container ({host.container})", wanted, "hold them on the host")
    return Finding(name, OK, "none: the driver did not come from packages", wanted)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
