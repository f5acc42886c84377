"""Which of the driver's reports no restart mends."""

from __future__ import annotations

from octoserve import xid

# As the driver writes them (dmesg of real hosts, addresses changed).
FELL_OFF = "[123.4] NVRM: Xid (PCI:0000:c1:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
PROGRAM = (
    "NVRM: Xid (PCI:0000:11:00): 31, pid=99, name=VLLM::Worker_TP0, channel 0x2, intr 0. MMU Fault: ENGINE GRAPHICS"
)
GSP = "NVRM: Xid (PCI:0000:29:00): 119, pid=5, name=nvidia-smi, Timeout after 6s of waiting for RPC response of GSP!"
NO_PID = "NVRM: Xid (PCI:0000:d8:00): 95, Contained: CE User Channel (0x9)."


def test_reports_are_read() -> None:
    found = xid.parse(["usb 1-1: new device", FELL_OFF, PROGRAM, NO_PID])
    assert [(report.card, report.number) for report in found] == [
        ("0000:c1:00", 79),
        ("0000:11:00", 31),
        ("0000:d8:00", 95),
    ]
    assert "GPU has fallen off the bus" in found[0].text


def test_a_programs_own_fault_is_not_fatal() -> None:
    assert xid.fatal([PROGRAM]) is None
    assert xid.fatal([]) is None


def test_the_last_fatal_one_counts() -> None:
    found = xid.fatal([FELL_OFF, PROGRAM, GSP, PROGRAM])
    assert found
    assert found.number == 119
    assert "GSP" in found.remedy
    assert str(found).startswith("Xid 119 of the GPU at 0000:29:00")
