"""The profile of the real target: what a typo in it would cost is an hour of loading on the 8-GPU host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def profile() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "files/profiles/glm5_ud_q4_k_xl.yml").read_text())
    return loaded


def test_the_ten_splits_are_complete_and_in_order(profile: dict[str, Any]) -> None:
    """The merge takes the first one as its input and finds the others by number."""
    paths = [file["path"] for file in profile["model"]["sources"][0]["files"]]
    assert paths == [f"UD-Q4_K_XL/GLM-5-UD-Q4_K_XL-{number:05d}-of-00010.gguf" for number in range(1, 11)]


@pytest.mark.parametrize("kind", ["args", "env"])
def test_every_setting_has_a_reason(profile: dict[str, Any], kind: str) -> None:
    assert profile["serve"][kind]
    for name, setting in profile["serve"][kind].items():
        assert set(setting) == {"value", "why"}, name
        assert len(setting["why"]) > 20, f"{name}: a reason, not a word"


def test_the_limits_of_the_target(profile: dict[str, Any]) -> None:
    gpu, throughput = profile["serve"]["gpu"], profile["gates"]["throughput"]
    assert profile["serve"]["args"]["tensor-parallel-size"]["value"] == gpu["count"] == 8
    assert 0.9 <= gpu["memory_utilization"] <= 0.95
    assert (throughput["floor_tok_s"], throughput["reference_tok_s"]) == (50, 57)
    assert profile["serve"]["env"]["NCCL_PROTO"]["value"] == "LL"
    assert profile["serve"]["env"]["NCCL_P2P_LEVEL"]["value"] == "SYS"


def test_the_example_host_serves_it() -> None:
    hosts = yaml.safe_load((ROOT / "inventory/example/hosts.yml").read_text())["octoserve"]["hosts"]
    for host in hosts.values():
        assert (ROOT / "files/profiles" / f"{host['octoserve_profile']}.yml").is_file()
