"""Made-up /proc and /sys trees of an eight-card host. No machine gave them."""

from __future__ import annotations

import struct
from pathlib import Path

from octoserve import nvml
from octoserve.finding import Host

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build  (someone@somewhere)\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.48.01  Mon Nov  2 00:00:00 UTC 2026\n"
GIB = 1024**3


def write(root: Path, path: str, text: str) -> None:
    """Write a file below the root, with its folders."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def card(index: int, width: int = 16, max_width: int = 16, max_generation: int = 5) -> nvml.Card:
    """A card at the address that the NVML stub gives it."""
    return nvml.Card(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        pci_bus_id=f"00000000:{0x11 + 8 * index:02X}:00.0",
        memory_total=95 * GIB,
        memory_free=95 * GIB,
        memory_used=0,
        processes=(),
        processes_visible=True,
        pcie=nvml.PcieLink(1, max_generation, width, max_width),
    )


def acs_config(control: int, *, length: int = 4096) -> bytes:
    """A bridge's configuration space: AER at 0x100, then ACS at 0x148 with this control register."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 2 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", config, 0x148, 0x000D | 1 << 16, 0x5F, control)
    return bytes(config[:length])


def make(
    root: Path,
    count: int = 8,
    *,
    group_type: str | None = "identity",
    control: int = 0,
    nodes: tuple[int, ...] = (0,),
) -> Host:
    """A bare machine with cards, each below a bridge of its own; `group_type` None has no IOMMU."""
    write(root, "proc/cpuinfo", "flags\t\t: fpu sse2\n")
    write(root, "proc/cmdline", "BOOT_IMAGE=/vmlinuz quiet" + (" iommu=pt" if group_type == "identity" else "") + "\n")
    write(root, "proc/driver/nvidia/version", OPEN)
    write(root, "sys/devices/system/node/online", f"0-{len(nodes) - 1}\n" if len(nodes) > 1 else "0\n")
    for index in range(count):
        bus = 0x11 + 8 * index
        bridge = f"sys/devices/pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0"
        address = f"0000:{bus:02x}:00.0"
        (root / bridge / address).mkdir(parents=True)
        (root / bridge / "config").write_bytes(acs_config(control))
        write(root, f"{bridge}/{address}/max_link_width", "16\n")
        write(root, f"{bridge}/{address}/max_link_speed", "32.0 GT/s PCIe\n")
        write(root, f"{bridge}/{address}/numa_node", f"{nodes[index * len(nodes) // count]}\n")
        devices = root / "sys/bus/pci/devices"
        devices.mkdir(parents=True, exist_ok=True)
        (devices / address).symlink_to(root / bridge / address)
        if group_type is not None:
            write(root, f"sys/kernel/iommu_groups/{index}/type", f"{group_type}\n")
            (root / bridge / address / "iommu_group").symlink_to(root / f"sys/kernel/iommu_groups/{index}")
    return Host(root)
