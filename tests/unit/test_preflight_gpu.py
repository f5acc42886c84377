"""Findings about cards and driver: the real nvidia-ml-py against the NVML stub, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up_host
import pytest
from octoserve import nvml, preflight_driver, preflight_gpu
from octoserve.finding import CANNOT_SEE, ERROR, OK, WARNING, Host
from octoserve.gpu_settings import Settings
from test_nvml import EIGHT_CARDS, compile_stub

ROOT = Path(__file__).parents[2]
GIB = 1024**3
# What `preflight.look` says about cards, for a made-up root; container_kind must not see the container of the tests.
DRIVER = """
import dataclasses, functools, json, sys
from pathlib import Path
from octoserve import nvml, preflight
from octoserve.finding import host_of
from octoserve.preflight_gpu import WantedGpus

options = json.loads(sys.argv[1])
host = host_of(Path(options["root"]))
nvml.container_kind = lambda: host.container
nvml.reading = functools.partial(nvml.reading, timeout_s=options["answer_s"])
wanted = WantedGpus(options["count"], options["name"], 0.95)
found = preflight._of_cards(wanted, options["cuda"], host, options["model_bytes"])
print(json.dumps([dataclasses.asdict(finding) for finding in found]))
"""
Look = Callable[..., dict[str, dict[str, str]]]


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_stub(tmp_path_factory.mktemp("nvml_stub"))


@pytest.fixture
def look(stub_library: Path, tmp_path: Path) -> Look:
    """Findings by name for a change of the eight cards' state, on a good host unless one is given."""

    def run(change: str = "", *, root: Path | None = None, container: str = "", **changed: Any) -> dict[str, Any]:
        if root is None:
            root = tmp_path / "root"
            if not root.exists():
                made_up_host.make(root)
                made_up_host.write(root, "var/lib/dpkg/status", "Package: bash\nStatus: install ok installed\n")
        if container:
            made_up_host.write(root, "run/systemd/container", container)
        state = tmp_path / "state"
        state.write_text(EIGHT_CARDS + change)
        usual = {
            "root": str(root),
            "count": 8,
            "name": "RTX PRO 6000",
            "cuda": "13.0",
            "model_bytes": 402 * 10**9,
            "answer_s": 60,
        }
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(stub_library),
            "OCTOSERVE_NVML_STUB": str(state),
            "PYTHONPATH": str(ROOT / "module_utils"),
        }
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, json.dumps({**usual, **changed})],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return {finding["name"]: finding for finding in json.loads(done.stdout)}

    return run


def test_eight_good_cards(look: Look) -> None:
    found = look()
    assert {name: finding["verdict"] for name, finding in found.items()} == dict.fromkeys(
        [
            *("GPU count", "GPU names", "GPU memory", "ECC", "persistence mode", "power limit", "P2P"),
            *("driver and library", "CUDA of the driver", "kernel module", "driver packages"),
            *("PCIe link", "IOMMU", "ACS", "NUMA"),
        ],
        OK,
    )
    assert found["GPU count"]["measured"] == "8 cards in NVML"
    assert found["GPU memory"]["measured"] == "8 x 95.59 GiB"
    assert found["P2P"]["measured"] == "OK between all 56 ordered pairs, says the driver"
    assert found["power limit"]["measured"] == "600 W"
    assert found["driver and library"]["measured"] == "driver 590.48.01, library 590.48.01, kernel module 590.48.01"


@pytest.mark.parametrize(
    ("change", "name", "wanted"),
    [
        ("cards 7\n", "GPU count", (ERROR, "7 cards in NVML", "lspci")),
        ("name 3 NVIDIA L4\n", "GPU names", (ERROR, "card 3: NVIDIA L4", "choose a profile")),
        ("total_mib 5 48000\n", "GPU memory", (WARNING, "1 x 46.88 GiB, 7 x 95.59 GiB", "one size")),
        ("total_mib * 48000\n", "GPU memory", (WARNING, "8 x 46.88 GiB, 356.25 GiB to use", "smaller quantization")),
        ("ecc 2 0 0\n", "ECC", (WARNING, "off on card 2", "nvidia-smi -e 1")),
        ("ecc 2 0 1\n", "ECC", (WARNING, "off on card 2, on after a reboot on card 2", "reboot")),
        ("ecc_uncorrected 6 3\n", "ECC", (WARNING, "card 6: 3 uncorrected errors", "Xid")),
        ("ecc * -1 -1\n", "ECC", (CANNOT_SEE, "cards 0, 1, 2, 3, 4, 5, 6, 7 do not say", "nvidia-smi")),
        ("persistence 0 0\n", "persistence mode", (WARNING, "off on card 0", "nvidia-persistenced")),
        ("persistence 0 -1\n", "persistence mode", (CANNOT_SEE, "card 0 does not say", "nvidia-smi")),
        ("power_limit 4 450000 600000\n", "power limit", (WARNING, "card 4: 450 W of 600 W", "nvidia-smi -pl 600")),
        ("power_limit 4 -1 600000\n", "power limit", (CANNOT_SEE, "card 4 does not say", "nvidia-smi")),
        ("p2p 0 * -1\n", "P2P", (CANNOT_SEE, "NVML does not say: 0->1, 0->2, 0->3, 0->4 and 3 more", "topo -p2p")),
        ("pcie 7 1 8 5 16\n", "PCIe link", (WARNING, "card 7 (00000000:49:00.0) x8 of x16", "seat the card")),
        ("cuda_version 12080\n", "CUDA of the driver", (ERROR, "serves up to CUDA 12.8", "CUDA 13.0")),
        ("nvml_version 13.595.10\n", "driver and library", (ERROR, "library 595.10", "reboot")),
    ],
)
def test_one_fault(look: Look, change: str, name: str, wanted: tuple[str, str, str]) -> None:
    verdict, measured, mend = wanted
    found = look(change)[name]
    assert found["verdict"] == verdict
    assert measured in found["measured"]
    assert mend in found["mend"]


def test_p2p_names_pairs_and_reason(look: Look) -> None:
    found = look("p2p 1 2 3\np2p 2 1 3\np2p 5 6 5\n")["P2P"]
    assert found["verdict"] == WARNING
    assert found["measured"] == (
        "read: no route through the host bridges (1->2, 2->1); read: not supported (5->6); "
        "write: no route through the host bridges (1->2, 2->1); write: not supported (5->6)"
    )


def test_a_driver_of_an_older_minor_version_may_lack_something(look: Look) -> None:
    assert look("cuda_version 13010\n", cuda="13.2")["CUDA of the driver"]["verdict"] == WARNING
    assert look("cuda_version 13010\n", cuda="13.1")["CUDA of the driver"]["verdict"] == OK
    assert "CUDA of the driver" not in look(cuda=None)


def test_memory_of_an_unknown_model(look: Look) -> None:
    assert look(model_bytes=None)["GPU memory"]["verdict"] == OK


def test_any_cards_will_do_but_they_should_be_of_one_kind(look: Look) -> None:
    assert look(name=None)["GPU names"]["verdict"] == OK
    assert look("name 3 NVIDIA L4\n", name=None)["GPU names"]["verdict"] == WARNING


def test_a_loaded_module_of_another_version(look: Look, tmp_path: Path) -> None:
    root = tmp_path / "other"
    made_up_host.make(root)
    made_up_host.write(root, "proc/driver/nvidia/version", made_up_host.OPEN.replace("590.48.01", "580.95.05"))
    found = look(root=root)["driver and library"]
    assert (found["verdict"], "kernel module 580.95.05" in found["measured"]) == (ERROR, True)


def test_no_driver_is_one_error_and_the_rest_is_not_claimed(look: Look) -> None:
    found = look("init_result 9\n")
    assert found["GPUs"]["verdict"] == ERROR
    assert "not loaded" in found["GPUs"]["measured"]
    for name in ("GPU memory", "ECC", "persistence mode", "power limit", "P2P", "PCIe link", "IOMMU", "ACS", "NUMA"):
        assert found[name]["verdict"] == CANNOT_SEE, name


def test_a_driver_of_another_version_than_the_library(look: Look) -> None:
    found = look("init_result 18\n")["GPUs"]
    assert (found["verdict"], "different drivers" in found["measured"]) == (ERROR, True)


def test_a_lost_card_is_named(look: Look) -> None:
    found = look("result 5 15\n")["GPUs"]
    assert (found["verdict"], "card 5 does not answer" in found["measured"]) == (ERROR, True)


def test_a_container_hides_what_is_the_hosts(look: Look) -> None:
    """NVML answers as on the host; IOMMU, ACS, NUMA and the driver's packages cannot be vouched for."""
    found = look(container="lxc")
    hidden = {name for name, finding in found.items() if finding["verdict"] == CANNOT_SEE}
    assert hidden == {"IOMMU", "ACS", "NUMA", "driver packages"}
    assert found["GPU count"]["verdict"] == OK


def test_an_nvml_that_does_not_return_is_an_error(look: Look) -> None:
    """As where the GSP firmware hangs: preflight would say nothing for ever."""
    found = look("init_seconds 60\n", answer_s=0.5)
    assert (found["GPUs"]["verdict"], found["GPUs"]["measured"]) == (ERROR, "NVML did not answer within 0.5 s")
    assert "Xid" in found["GPUs"]["mend"]
    assert found["P2P"]["verdict"] == CANNOT_SEE


def test_a_container_without_cards_cannot_serve(look: Look) -> None:
    found = look("init_result 9\n", container="lxc")["GPUs"]
    assert (found["verdict"], "container (lxc)" in found["measured"]) == (ERROR, True)


# What needs no stub.


def settings(capability: tuple[int, int] | None) -> Settings:
    return Settings(0, capability, True, True, 0, True, 600.0, 600.0)


@pytest.mark.parametrize(
    ("text", "cards", "verdict"),
    [
        (made_up_host.OPEN, [settings((12, 0))], OK),
        (made_up_host.PROPRIETARY, [settings((12, 0))], ERROR),
        (made_up_host.PROPRIETARY, [settings((10, 0))], ERROR),
        (made_up_host.PROPRIETARY, [settings((9, 0))], OK),
        (made_up_host.PROPRIETARY, [], ERROR),  # what a Blackwell card looks like that the module does not bring up
        (made_up_host.PROPRIETARY, [settings(None)], CANNOT_SEE),
        (made_up_host.PROPRIETARY, None, CANNOT_SEE),
        (None, [settings((12, 0))], CANNOT_SEE),
    ],
)
def test_kernel_module(tmp_path: Path, text: str | None, cards: list[Settings] | None, verdict: str) -> None:
    if text:
        made_up_host.write(tmp_path, "proc/driver/nvidia/version", text)
    assert preflight_driver.kernel_module(cards, Host(tmp_path)).verdict == verdict


def dpkg(*packages: tuple[str, str]) -> str:
    return "\n\n".join(f"Package: {name}\nStatus: {status}\nVersion: 1" for name, status in packages) + "\n"


def test_driver_packages(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert preflight_driver.packages(host).verdict == CANNOT_SEE
    status = "var/lib/dpkg/status"
    held, loose = "hold ok installed", "install ok installed"
    others = [("bash", loose), ("nvidia-container-toolkit", loose), ("nvidia-driver-580", "deinstall ok config-files")]
    made_up_host.write(tmp_path, status, dpkg(*others))
    assert preflight_driver.packages(host).verdict == OK, "neither a tool nor a removed driver counts"
    assert preflight_driver.packages(Host(tmp_path, container="lxc")).verdict == CANNOT_SEE

    made_up_host.write(
        tmp_path, status, dpkg(*others, ("nvidia-driver-590-open", held), ("libnvidia-compute-590", loose))
    )
    found = preflight_driver.packages(host)
    assert (found.verdict, found.measured) == (WARNING, "not held: libnvidia-compute-590")
    assert "apt-mark hold libnvidia-compute-590" in found.mend

    made_up_host.write(tmp_path, status, dpkg(("nvidia-driver-590-open", held), ("libnvidia-compute-590", held)))
    assert preflight_driver.packages(host).verdict == OK
    assert preflight_driver.packages(Host(tmp_path, virtual=True)).verdict == OK, "its driver is its own"
    inside = preflight_driver.packages(Host(tmp_path, container="lxc"))
    assert (inside.verdict, "this container (lxc)" in inside.measured) == (CANNOT_SEE, True), "the host's are others"


def test_no_card_is_no_good_card() -> None:
    nothing = nvml.Gpus("590.48.01", "13.590.48.01", "13.1", None, ())
    assert preflight_gpu.memory(nothing, 0.95, None).verdict == CANNOT_SEE
    assert preflight_gpu.count(nothing, 8).verdict == ERROR
    for finding in (preflight_gpu.ecc(()), preflight_gpu.persistence(()), preflight_gpu.power_limit(())):
        assert finding.verdict == CANNOT_SEE


def test_one_card_has_no_peer() -> None:
    assert preflight_gpu.p2p((), 1).verdict == OK
