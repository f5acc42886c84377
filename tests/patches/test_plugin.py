"""Parts of the patched plugin by themselves: what it refuses, and what only a CUDA run uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Stack, altered
from octoserve import patches


def check(stack: Stack, folder: Path) -> dict[str, Any]:
    done = stack.run("check_plugin.py", str(folder))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def found(patched: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return check(patched, tmp_path_factory.mktemp("plugin"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "2 tensors missing ['blk.0.attn_v_b.weight', 'blk.1.ffn_up_exps.weight'], 0 without a place"),
        ("missing_split", "tensors missing ['blk."),
        ("too_many_layers", "without a place ['blk.2.attn_k_b.weight'"),
        (
            "too_many_experts",
            "has 6 routed experts, the GGUF file has others: ['blk.1.ffn_gate_exps.weight (4)'",
        ),
        ("unfilled", "1 parameters without a tensor in the GGUF file: ['bias']"),
        ("one_half", "only one half of kv_b_proj in the file: ['a']"),
        ("typeless", "a.qweight comes without its quantization type"),
    ],
    ids=lambda value: value if value.isidentifier() else "",
)
def test_what_would_leave_a_weight_uninitialized_is_refused_by_name(
    found: dict[str, Any], name: str, message: str
) -> None:
    assert found[name].startswith("ValueError: ")
    assert message in found[name]


def test_indexers_and_mtp_are_left_aside_and_nothing_else(found: dict[str, Any]) -> None:
    aside = found["left_aside"]
    assert [name for name in aside if not name.startswith("blk.2.")] == [
        f"blk.{layer}.indexer.{part}"
        for layer in (0, 1)
        for part in ("attn_k.weight", "attn_q_b.weight", "k_norm.bias", "k_norm.weight", "proj.weight")
    ]
    assert {"blk.2.attn_norm.weight", "blk.2.nextn.eh_proj.weight"} <= set(aside)


def test_a_sparse_run_loads_the_indexers_that_the_file_has(found: dict[str, Any]) -> None:
    assert found["indexers"] == [
        f"model.layers.0.self_attn.indexer.{part}"
        for part in ("k_norm.bias", "k_norm.weight", "weights_proj.weight", "wk.weight", "wq_b.weight")
    ]


def test_names_follow_from_the_config_of_deepseek_v2_lite(found: dict[str, Any]) -> None:
    names = found["lite"]
    assert names["blk.1.attn_q.weight"] == "model.layers.1.self_attn.q_proj.weight"
    assert names["blk.1.attn_kv_b.weight"] == "model.layers.1.self_attn.kv_b_proj.weight"
    assert names["blk.1.ffn_down_exps.weight"] == "model.layers.1.mlp.experts.0.down_proj.weight"
    assert not {"blk.1.attn_q_a.weight", "blk.1.attn_k_b.weight", "blk.1.exp_probs_b.bias"} & set(names)


def test_only_the_parameter_of_a_quantized_weight_is_renamed(found: dict[str, Any]) -> None:
    module = "model.layers.0.self_attn.indexer.weights_proj"
    assert found["renamed"] == [f"{module}.qweight_type", f"{module}.qweight"]


def test_each_rank_takes_its_own_shard(found: dict[str, Any]) -> None:
    assert found["shards"] == {"gate_up": [0, 4], "q": [0, 4], "k": [0, 2]}


def test_without_the_patches_for_cuda_the_last_two_fail(python: str, series: patches.Series, tmp_path: Path) -> None:
    for_cuda = {patch.file for patch in series.patches if patch.proof == "cuda"}
    assert sorted(file[:4] for file in for_cuda) == ["0008", "0009"]
    with altered(python, series, tmp_path / "site", for_cuda) as stack:
        released = check(stack, tmp_path / "files")
    module = "model.layers.0.self_attn.indexer.q"
    assert released["renamed"] == [f"{module}weight_types_proj.qweight_type", f"{module}weights_proj.qweight"]
    assert released["shards"] == {"gate_up": [0, 0], "q": [0, 0], "k": [0, 0]}
