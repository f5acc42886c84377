"""One thing that preflight looked at: what was measured, what is wanted, how to mend it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from . import nvml

OK = "ok"
WARNING = "warning"
"""Costs speed or safety; the deploy goes on."""
ERROR = "error"
"""The deploy would fail later, after an hour of loading."""
CANNOT_SEE = "cannot see"
"""Not readable from here, so nothing is claimed."""

GIB = 1024**3


@dataclass(frozen=True)
class Finding:
    """`verdict` is one of the constants above; `mend` is empty where nothing is to be done."""

    name: str
    verdict: str
    measured: str
    wanted: str
    mend: str = ""


@dataclass(frozen=True)
class Host:
    """Where to look, and what stands between this process and the hardware."""

    root: Path = Path("/")
    """Holds proc, sys and dev; tests make their own."""
    container: str | None = None
    virtual: bool = False

    @property
    def hidden_by(self) -> str | None:
        """What may hide the real machine, None where nothing does."""
        if self.container:
            return f"this container ({self.container})"
        return "this virtual machine" if self.virtual else None


def host_of(root: Path = Path("/")) -> Host:
    """The machine below the root. A virtual machine is told by the CPU flag that x86 hypervisors set."""
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", read(root / "proc/cpuinfo") or "", re.MULTILINE)
    return Host(root, nvml.container_kind(root), bool(flags))


def read(path: Path) -> str | None:
    """The file's text without white space around it; None where it is not there or not ours to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def unless_hidden(finding: Finding, host: Host) -> Finding:
    """The finding; where the real machine may look different from outside, "ok" becomes "cannot see".

    A bad sign is a sign wherever it is seen, so warnings and errors stay.
    """
    if finding.verdict != OK or host.hidden_by is None:
        return finding
    return replace(
        finding,
        verdict=CANNOT_SEE,
        measured=f"{finding.measured}, as far as {host.hidden_by} shows",
        mend=finding.mend or "look on the machine itself",
    )


def line(finding: Finding) -> str:
    """The finding on one line, for people."""
    text = f"{finding.verdict + ':':<12}{finding.name}: {finding.measured}"
    if finding.verdict != OK:
        text += f". Wanted: {finding.wanted}"
        text += f". To do: {finding.mend}" if finding.mend else ""
    return text


def cards(indices: Iterable[int]) -> str:
    """Such as "card 3" or "cards 0, 1, 2"."""
    found = [str(index) for index in indices]
    return f"card{'' if len(found) == 1 else 's'} {', '.join(found)}"


def silent(indices: Iterable[int]) -> str:
    """Such as "card 3 does not say"; for no index "no card"."""
    found = list(indices)
    if not found:
        return "no card"
    return f"{cards(found)} {'does' if len(found) == 1 else 'do'} not say"
