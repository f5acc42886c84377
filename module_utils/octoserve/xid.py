"""Errors that NVIDIA's driver reports in the kernel's log, and which of them no restart mends.

Lines like "NVRM: Xid (PCI:0000:c1:00): 79, pid=1234, name=python, GPU has fallen off the bus." Numbers and remedies:
https://docs.nvidia.com/deploy/xid-errors/
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from . import bounded

_LINE = re.compile(r"NVRM: Xid \(PCI:(?P<card>[0-9a-fA-F:.]+)\): (?P<number>\d+)(?:, *(?P<text>.*))?")
#: A program's own faults (13, 31, 43, 45 and others) end with the program; after these the card needs more.
FATAL = {
    48: "double-bit ECC error: reset the GPU",
    62: "the GPU's microcontroller halted: reset the GPU",
    64: "a row could not be remapped: reset the GPU, replace it if it comes again",
    74: "NVLink error: reset the GPUs",
    79: "the GPU fell off the bus: power-cycle the host",
    95: "uncontained ECC error: reset the GPU",
    119: "the GSP firmware does not answer: reset the GPU or reboot",
    120: "the GSP firmware failed: reset the GPU or reboot",
    140: "unrecovered ECC error: reset the GPU",
    143: "the GPU failed to initialize: reset the GPU or reboot",
    151: "a key rotation failed: reset the GPU",
}


@dataclass(frozen=True)
class Xid:
    """One report of the driver: the card's PCI address, the number, and the driver's own words."""

    card: str
    number: int
    text: str

    @property
    def remedy(self) -> str:
        """What has to be done, empty where ending the program was enough."""
        return FATAL.get(self.number, "")

    def __str__(self) -> str:
        return f"Xid {self.number} of the GPU at {self.card} ({self.text or 'no text'})"


def parse(lines: Iterable[str]) -> list[Xid]:
    """The reports among lines of the kernel's log, oldest first."""
    matches = filter(None, (_LINE.search(line) for line in lines))
    return [Xid(match["card"], int(match["number"]), (match["text"] or "").strip()) for match in matches]


def fatal(lines: Iterable[str]) -> Xid | None:
    """The last report that no restart mends, None where there is none."""
    return next((found for found in reversed(parse(lines)) if found.remedy), None)


def kernel_log(since: float) -> list[str]:
    """The kernel's lines from a moment on (seconds since 1970), none where the host does not show them."""
    command = ["journalctl", "--dmesg", "--quiet", "--output=cat", "--no-pager", f"--since=@{since:.0f}"]
    return bounded.run(command, timeout_s=60).splitlines()
