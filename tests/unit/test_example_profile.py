"""The profile of the real target: what a typo in it would cost is an hour of loading on the 8-GPU host."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures import glm5_header as glm

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
    assert throughput["floor_tok_s"] == 50
    assert profile["serve"]["env"]["NCCL_PROTO"]["value"] == "LL"
    assert profile["serve"]["env"]["NCCL_P2P_LEVEL"]["value"] == "SYS"


def test_the_memory_that_it_reckons_with(profile: dict[str, Any]) -> None:
    """The figures of `max-model-len`, worked out from GLM-5's shapes: GiB of one of eight ranks."""
    gib, length = 1024**3, profile["serve"]["args"]["max-model-len"]["value"]
    token = glm.GLM.layers * (2 * (glm.KV_LORA + glm.ROPE) + glm.INDEX_DIM + 4)  # bf16; fp8 keys with a float32 scale
    tensors = {name: tensor for name, tensor in glm.tensors().items() if not name.startswith(f"blk.{glm.GLM.layers}.")}

    def size(pattern: str, *, bf16: bool = False) -> int:
        found = [tensor for name, tensor in tensors.items() if re.search(pattern, name)]
        return sum(2 * math.prod(tensor.ne) if bf16 else len(tensor.data) for tensor in found)

    indexer, kv_b, whole = r"\.indexer\.", r"attn_[kv]_b", r"attn_(q_a|kv_a_mqa)\.|norm|ffn_gate_inp|exp_probs_b"
    sharded = size(rf"^(?!.*({indexer}|{kv_b}|{whole}))")
    # The halves of kv_b_proj are kept beside it, as the products with them are made.
    weights = sharded / 8 + size(rf"^(?!.*{indexer}).*({whole})") + 2 * size(kv_b, bf16=True) / 8
    indexers = size(indexer, bf16=True)
    buffers = 40 * length * (glm.INDEX_DIM + 4) + 512 * 1024**2
    usable = 94.97 * profile["serve"]["gpu"]["memory_utilization"] * gib
    left = usable - weights - indexers - buffers
    reckoned = [length * token, usable, weights + indexers, indexers, buffers, left]
    told = profile["serve"]["args"]["max-model-len"]["why"]
    assert f"{token:,} bytes" in told
    assert [f"{figure / gib:.1f}" for figure in reckoned] == re.findall(r"\b\d+\.\d\b", told)


def test_the_example_host_serves_it() -> None:
    hosts = yaml.safe_load((ROOT / "inventory/example/hosts.yml").read_text())["octoserve"]["hosts"]
    for host in hosts.values():
        assert (ROOT / "files/profiles" / f"{host['octoserve_profile']}.yml").is_file()
