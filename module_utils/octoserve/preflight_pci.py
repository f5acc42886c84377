"""Findings about the way between the cards: PCIe links, IOMMU, ACS and NUMA, from /sys.

Sources: Linux' Documentation/ABI/testing/sysfs-kernel-iommu_groups and drivers/iommu/iommu.c (`iommu_group_show_type`)
for the types of a group; include/uapi/linux/pci_regs.h (PCI_EXT_CAP_ID_ACS, PCI_ACS_CTRL) for ACS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from .finding import CANNOT_SEE, OK, WARNING, Finding, Host, cards, read, silent, unless_hidden
from .nvml import Card

HEADER = 64  # bytes of a device's configuration space that everyone may read
EXTENDED = 256  # offset at which the extended capabilities begin
ACS = 0x000D  # id of the extended capability
ACS_CONTROL = 6  # offset of its control register
# Bits of that register that send a request, or its completion, up to the root complex, past the direct way.
REDIRECT = {0x04: "ReqRedir", 0x08: "CmpltRedir"}
#: PCIe generation by what /sys says of a link's speed, GT/s.
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")
_IOMMU_ARGUMENT = re.compile(r"\S*iommu\S*")


def findings(found: Sequence[Card], host: Host) -> list[Finding]:
    """All findings about the way between the cards."""
    return [links(found, host), iommu(found, host), acs(found, host), numa(found, host)]


def device(card: Card, host: Host) -> Path:
    """The card's folder in /sys. NVML writes the domain with eight digits and in capitals."""
    domain, _, rest = card.pci_bus_id.lower().partition(":")
    return host.root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{rest}"


def links(found: Sequence[Card], host: Host) -> Finding:
    """Lanes and generation of each card, against what the card itself has.

    NVML's maximum is that of card and slot together, /sys has the card's own. The generation of now is only told: it
    drops while a card is at rest.
    """
    name, wanted = "PCIe link", "the lanes and the generation that each card has"
    less, unknown = [], []
    kinds: dict[str, list[int]] = {}
    for card in found:
        link, folder = card.pcie, device(card, host)
        lanes = max(_number(read(folder / "max_link_width")) or 0, link.max_width or 0)
        generation = GENERATIONS.get((read(folder / "max_link_speed") or "").partition(" ")[0])
        short = []
        if link.width is not None and link.width < lanes:
            short.append(f"x{link.width} of x{lanes}")
        if None not in (link.max_generation, generation) and (link.max_generation or 0) < (generation or 0):
            short.append(f"generation {link.max_generation} of {generation}")
        if short:
            less.append(f"card {card.index} ({card.pci_bus_id}) {', '.join(short)}")
        if not lanes or None in (link.width, link.max_generation, generation):
            unknown.append(card.index)
        kind = f"x{link.width}, generation {link.generation or 'unknown'} now of {link.max_generation}"
        kinds.setdefault(kind, []).append(card.index)
    if less:
        mend = (
            "seat the card anew, look at riser and slot (a slot of 16 may have 8 lanes, and be of an earlier "
            "generation), at bifurcation and link speed in the firmware: every all-reduce goes over these links"
        )
        return Finding(name, WARNING, ", ".join(less), wanted, mend)
    if unknown or not found:
        measured = silent(unknown)
        return Finding(name, CANNOT_SEE, measured, wanted, "`lspci -vv -d 10de:` as root, LnkSta against LnkCap")
    told = "; ".join(kinds if len(kinds) == 1 else (f"{kind}: {cards(who)}" for kind, who in kinds.items()))
    return Finding(name, OK, f"{told} (it drops at rest)", wanted)


def iommu(found: Sequence[Card], host: Host) -> Finding:
    """How the kernel maps the cards' accesses to memory: not at all, one to one, or page by page."""
    name, wanted = "IOMMU", "off, or passthrough (groups of type identity)"
    by_hand = "`cat /proc/cmdline; cat /sys/kernel/iommu_groups/*/type` on the machine itself"
    arguments = " ".join(_IOMMU_ARGUMENT.findall(read(host.root / "proc/cmdline") or "")) or "none"
    kinds: dict[str, list[int]] = {}
    for card in found:
        folder = device(card, host)
        if not folder.exists():
            return Finding(name, CANNOT_SEE, f"no /sys/bus/pci/devices/{folder.name}", wanted, by_hand)
        kinds.setdefault(_group_type(folder, host), []).append(card.index)
    if not kinds or "not readable" in kinds:
        measured = (
            "no card" if not kinds else f"the IOMMU group's type of {cards(kinds['not readable'])} is not readable"
        )
        return Finding(name, CANNOT_SEE, measured, wanted, by_hand)
    measured = "; ".join(f"{kind}: {cards(indices)}" for kind, indices in sorted(kinds.items()))
    measured += f"; IOMMU on the kernel's command line: {arguments}"
    if set(kinds) <= {"off", "identity"}:
        return unless_hidden(Finding(name, OK, measured, wanted), host)
    mend = (
        "add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub, `update-grub`, reboot (or turn the IOMMU off in the "
        "firmware); translated accesses between cards hang or crawl"
    )
    return Finding(name, WARNING, measured, wanted, mend)


def acs(found: Sequence[Card], host: Host) -> Finding:
    """Whether a bridge above the cards sends what goes from card to card up to the root complex."""
    name, wanted = "ACS", "no redirection on the bridges above the cards"
    by_hand = "`lspci -vvv | grep -i acsctl` as root on the machine itself"
    above = sorted({bridge for card in found for bridge in _bridges(device(card, host))})
    if not above:
        return Finding(name, CANNOT_SEE, "no bridge above the cards in /sys", wanted, by_hand)
    redirecting, unreadable = [], []
    for bridge in above:
        try:
            config = (bridge / "config").read_bytes()
        except OSError:
            config = b""
        if len(config) <= HEADER:
            unreadable.append(bridge.name)
            continue
        bits = [word for bit, word in REDIRECT.items() if (acs_control(config) or 0) & bit]
        if bits:
            redirecting.append(f"{bridge.name} ({' '.join(bits)})")
    if redirecting:
        mend = (
            "turn ACS off in the firmware, or after each boot `setpci -s BRIDGE ECAP_ACS+0x6.w=0000` for each of them; "
            "it also isolates virtual machines from each other, so not where they share this machine"
        )
        return Finding(name, WARNING, f"redirecting: {', '.join(redirecting)}", wanted, mend)
    if unreadable:
        measured = f"the extended configuration of {', '.join(unreadable)} is not readable from here (it takes root)"
        return Finding(name, CANNOT_SEE, measured, wanted, by_hand)
    measured = f"no redirection on {len(above)} bridge{'' if len(above) == 1 else 's'}"
    return unless_hidden(Finding(name, OK, measured, wanted), host)


def acs_control(config: bytes) -> int | None:
    """The ACS control register out of a device's configuration space; None where it has no such capability."""
    offset, seen = EXTENDED, set[int]()
    while EXTENDED <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == ACS:
            start = offset + ACS_CONTROL
            return int.from_bytes(config[start : start + 2], "little")
        offset = header >> 20
    return None


def numa(found: Sequence[Card], host: Host) -> Finding:
    """Whether the cards hang on one socket. A node of -1 is a firmware that does not say."""
    name, wanted = "NUMA", "all cards on one node"
    nodes: dict[int, list[int]] = {}
    for card in found:
        node = _number(read(device(card, host) / "numa_node"))
        nodes.setdefault(-1 if node is None else node, []).append(card.index)
    online = read(host.root / "sys/devices/system/node/online")
    if online == "0":
        return unless_hidden(Finding(name, OK, "the machine has one node", wanted), host)
    if not nodes or -1 in nodes:
        measured = "no card" if not nodes else f"the node of {cards(nodes[-1])} is not told"
        return Finding(name, CANNOT_SEE, measured, wanted, "`nvidia-smi topo -m` on the machine itself")
    measured = "; ".join(f"node {node}: {cards(indices)}" for node, indices in sorted(nodes.items()))
    if len(nodes) == 1:
        return unless_hidden(Finding(name, OK, measured, wanted), host)
    mend = "where the slots allow it, put all cards on one socket; else each all-reduce crosses the sockets' link"
    return Finding(name, WARNING, measured, wanted, mend)


def _group_type(folder: Path, host: Host) -> str:
    """Type of the card's IOMMU group, such as DMA-FQ; off where it is in none."""
    link = folder / "iommu_group"
    if not link.is_symlink():
        return "off"
    number = link.readlink().name
    return read(host.root / "sys/kernel/iommu_groups" / number / "type") or "not readable"


def _bridges(folder: Path) -> Iterator[Path]:
    """The folders of the bridges above a card: /sys/devices holds each device below the bridge that it hangs on."""
    for parent in folder.resolve().parents:
        if not _ADDRESS.match(parent.name):
            return
        yield parent


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None
