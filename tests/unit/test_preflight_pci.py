"""Findings about the way between the cards, from made-up /sys trees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import made_up_host
import pytest
from made_up_host import card, make, write
from octoserve import preflight_pci
from octoserve.finding import CANNOT_SEE, OK, WARNING, Host, host_of

CARDS = [card(index) for index in range(8)]


def bridges(root: Path) -> list[Path]:
    return sorted(root.glob("sys/devices/pci*/0000:*/config"))


def test_a_good_host(tmp_path: Path) -> None:
    host = make(tmp_path)
    assert host_of(tmp_path) == host, "neither container nor virtual"
    found = preflight_pci.findings(CARDS, host)
    assert [(finding.name, finding.verdict) for finding in found] == [
        ("PCIe link", OK),
        ("IOMMU", OK),
        ("ACS", OK),
        ("NUMA", OK),
    ]
    assert found[0].measured == "x16, generation 1 now of 5 (it drops at rest)"
    assert "iommu=pt" in found[1].measured
    assert found[2].measured == "no redirection on 8 bridges"


def test_a_narrow_link_names_the_card(tmp_path: Path) -> None:
    found = preflight_pci.links([card(0), card(1, width=8)], make(tmp_path, 2))
    assert (found.verdict, found.measured) == (WARNING, "card 1 (00000000:19:00.0) x8 of x16")


def test_a_slot_with_fewer_lanes_than_the_card_is_seen_in_sys(tmp_path: Path) -> None:
    """NVML's maximum is that of card and slot together, so it takes /sys to know what the card itself has."""
    narrow = card(0, width=8, max_width=8)
    assert preflight_pci.links([narrow], make(tmp_path, 1)).verdict == WARNING
    assert preflight_pci.links([narrow], Host(tmp_path / "nothing")).verdict == CANNOT_SEE
    assert preflight_pci.links([card(0, width=8)], Host(tmp_path / "nothing")).verdict == WARNING, "NVML alone says so"


def test_a_slot_of_an_earlier_generation_names_the_card(tmp_path: Path) -> None:
    """The cards idle at generation 1, all of them; one cannot do better than 3."""
    found = preflight_pci.links(
        [card(0), card(1, max_generation=3), card(2, width=8, max_generation=4)], make(tmp_path, 3)
    )
    assert found.verdict == WARNING
    assert found.measured == (
        "card 1 (00000000:19:00.0) generation 3 of 5, card 2 (00000000:21:00.0) x8 of x16, generation 4 of 5"
    )
    assert "firmware" in found.mend


def test_cards_of_different_generations_are_told_apart(tmp_path: Path) -> None:
    host = make(tmp_path, 2)
    write(tmp_path, "sys/bus/pci/devices/0000:19:00.0/max_link_speed", "16.0 GT/s PCIe\n")
    found = preflight_pci.links([card(0), card(1, max_generation=4)], host)
    assert found.verdict == OK
    assert found.measured == (
        "x16, generation 1 now of 5: card 0; x16, generation 1 now of 4: card 1 (it drops at rest)"
    )


def test_a_card_that_does_not_tell_its_width(tmp_path: Path) -> None:
    mute = replace(card(0), pcie=replace(card(0).pcie, width=None))
    host = make(tmp_path, 1)
    assert preflight_pci.links([mute], host).verdict == CANNOT_SEE
    write(tmp_path, "sys/bus/pci/devices/0000:11:00.0/max_link_speed", "Unknown\n")
    assert preflight_pci.links([card(0)], host).verdict == CANNOT_SEE
    assert preflight_pci.links([], Host(tmp_path)).verdict == CANNOT_SEE


@pytest.mark.parametrize(
    ("group_type", "verdict", "words"),
    [
        (None, OK, "off: cards 0, 1"),
        ("identity", OK, "identity: cards 0, 1"),
        ("DMA", WARNING, "DMA: cards 0, 1"),
        ("DMA-FQ", WARNING, "DMA-FQ: cards 0, 1; IOMMU on the kernel's command line: none"),
        ("blocked", WARNING, "blocked"),
    ],
)
def test_iommu_modes(tmp_path: Path, group_type: str | None, verdict: str, words: str) -> None:
    found = preflight_pci.iommu(CARDS[:2], make(tmp_path, 2, group_type=group_type))
    assert found.verdict == verdict
    assert words in found.measured
    assert ("iommu=pt" in found.mend) == (verdict == WARNING)


def test_one_translated_card_is_enough_for_a_warning(tmp_path: Path) -> None:
    host = make(tmp_path, 2)
    write(tmp_path, "sys/kernel/iommu_groups/1/type", "DMA\n")
    found = preflight_pci.iommu(CARDS[:2], host)
    assert found.verdict == WARNING
    assert "DMA: card 1" in found.measured


def test_iommu_that_is_not_to_be_seen(tmp_path: Path) -> None:
    assert preflight_pci.iommu(CARDS[:1], Host(tmp_path / "nothing")).verdict == CANNOT_SEE
    host = make(tmp_path, 1)
    (tmp_path / "sys/kernel/iommu_groups/0/type").unlink()
    found = preflight_pci.iommu(CARDS[:1], host)
    assert (found.verdict, "not readable" in found.measured) == (CANNOT_SEE, True)


@pytest.mark.parametrize("hidden", ["container", "virtual"])
def test_nothing_good_is_claimed_where_the_machine_is_hidden(tmp_path: Path, hidden: str) -> None:
    make(tmp_path, group_type=None)
    if hidden == "container":
        write(tmp_path, "run/systemd/container", "lxc\n")
    else:
        write(tmp_path, "proc/cpuinfo", "flags\t\t: fpu hypervisor sse2\n")
    host = host_of(tmp_path)
    for look in (preflight_pci.iommu, preflight_pci.acs, preflight_pci.numa):
        found = look(CARDS, host)
        assert found.verdict == CANNOT_SEE
        assert ("lxc" if hidden == "container" else "virtual machine") in found.measured


def test_a_bad_sign_counts_in_a_container_too(tmp_path: Path) -> None:
    host = replace(make(tmp_path, group_type="DMA", control=0x1D, nodes=(0, 1)), container="docker")
    for look in (preflight_pci.iommu, preflight_pci.acs, preflight_pci.numa):
        assert look(CARDS, host).verdict == WARNING


@pytest.mark.parametrize(
    ("control", "words"), [(0x04, "(ReqRedir)"), (0x08, "(CmpltRedir)"), (0x1D, "(ReqRedir CmpltRedir)")]
)
def test_acs_redirection_names_the_bridge(tmp_path: Path, control: int, words: str) -> None:
    host = make(tmp_path, 2)
    bridges(tmp_path)[1].write_bytes(made_up_host.acs_config(control))
    found = preflight_pci.acs(CARDS[:2], host)
    assert (found.verdict, found.measured) == (WARNING, f"redirecting: 0000:18:01.0 {words}")
    assert "ECAP_ACS" in found.mend


def test_acs_bits_that_leave_the_direct_way_are_fine(tmp_path: Path) -> None:
    """Source validation and upstream forwarding."""
    assert preflight_pci.acs(CARDS[:1], make(tmp_path, 1, control=0x11)).verdict == OK


def test_acs_is_looked_for_on_every_bridge_above(tmp_path: Path) -> None:
    """A switch: root port, upstream port, downstream port, card."""
    host = make(tmp_path, 0)
    folder = tmp_path / "sys/devices/pci0000:10/0000:10:01.0/0000:0e:00.0/0000:0f:00.0"
    (folder / "0000:11:00.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:11:00.0").symlink_to(folder / "0000:11:00.0")
    for bridge, control in ((folder, 0), (folder.parent, 0), (folder.parents[1], 0x0C)):
        (bridge / "config").write_bytes(made_up_host.acs_config(control))
    assert preflight_pci.acs(CARDS[:1], host).measured == "redirecting: 0000:10:01.0 (ReqRedir CmpltRedir)"


def test_acs_without_the_right_to_read_it(tmp_path: Path) -> None:
    """Everyone may read 64 bytes, root the rest: a file cut there says nothing about ACS."""
    host = make(tmp_path, 1)
    bridges(tmp_path)[0].write_bytes(made_up_host.acs_config(0x1D, length=64))
    found = preflight_pci.acs(CARDS[:1], host)
    assert (found.verdict, "it takes root" in found.measured) == (CANNOT_SEE, True)
    assert preflight_pci.acs(CARDS[:1], Host(tmp_path / "nothing")).verdict == CANNOT_SEE


def test_acs_control_register() -> None:
    assert preflight_pci.acs_control(made_up_host.acs_config(0x1D)) == 0x1D
    assert preflight_pci.acs_control(bytes(4096)) is None
    assert preflight_pci.acs_control(bytes(256)) is None
    loop = bytearray(4096)
    loop[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert preflight_pci.acs_control(bytes(loop)) is None, "a list that points at itself ends"


def test_cards_on_two_sockets(tmp_path: Path) -> None:
    found = preflight_pci.numa(CARDS, make(tmp_path, nodes=(0, 1)))
    assert (found.verdict, found.measured) == (WARNING, "node 0: cards 0, 1, 2, 3; node 1: cards 4, 5, 6, 7")


def test_cards_on_one_of_two_sockets(tmp_path: Path) -> None:
    assert preflight_pci.numa(CARDS, make(tmp_path, nodes=(1, 1))).verdict == OK


def test_a_firmware_that_does_not_say_the_node(tmp_path: Path) -> None:
    found = preflight_pci.numa(CARDS, make(tmp_path, nodes=(0, -1)))
    assert (found.verdict, found.measured) == (CANNOT_SEE, "the node of cards 4, 5, 6, 7 is not told")
