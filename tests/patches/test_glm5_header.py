"""GLM-5 of the real size: every tensor of the file has a place, every parameter gets a tensor of its shape.

The names are vLLM's, from its own models; the shapes are worked out here from the file's header, rank by rank.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, TypeAlias

import pytest
from conftest import ROOT, Stack

sys.path.extend([str(ROOT), str(ROOT / "tests/unit")])
from octoserve.gguf import GGML_TYPES

from tests.fixtures import glm5_header

Shape: TypeAlias = list[Any] | dict[str, list[Any]]

FILE = glm5_header.tensors()
MTP = glm5_header.GLM.layers
INDEXER = ("attn_k.weight", "attn_q_b.weight", "k_norm.bias", "k_norm.weight", "proj.weight")
RUNS = ("sparse, 1 rank", "dense, last of 8 ranks")


@pytest.fixture(scope="module")
def found(patched: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = patched.run("check_glm5_header.py", str(tmp_path_factory.mktemp("glm5")))
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert tuple(result) == RUNS
    return result


def blocks(name: str, rows: int, columns: int) -> list[Any]:
    """So many rows of a tensor as they lie in the file; plain types as values."""
    kind, elements, size = GGML_TYPES[FILE[name].kind]
    if kind == "F32":
        return [rows, columns, "bfloat16"]
    assert columns % elements == 0, f"{name}: {columns} columns end within a block of {elements}"
    return [rows, columns // elements * size, "uint8"]


def wanted(layer: int, size: int, sparse: bool) -> dict[str, Shape]:
    """The parameters of one layer on one of `size` ranks."""
    file, hidden = f"blk.{layer}", glm5_header.HIDDEN
    heads = glm5_header.HEADS // size
    head, value = glm5_header.NOPE + glm5_header.ROPE, glm5_header.VALUE
    q_lora, kv_lora = glm5_header.Q_LORA, glm5_header.KV_LORA
    attention: dict[str, Shape] = {
        "fused_qkv_a_proj.qweight": {
            "0": blocks(f"{file}.attn_q_a.weight", q_lora, hidden),
            "1": blocks(f"{file}.attn_kv_a_mqa.weight", kv_lora + glm5_header.ROPE, hidden),
        },
        "q_a_layernorm.weight": [q_lora, "bfloat16"],
        "q_b_proj.qweight": blocks(f"{file}.attn_q_b.weight", heads * head, q_lora),
        "kv_a_layernorm.weight": [kv_lora, "bfloat16"],
        "kv_b_proj.weight": [heads * (glm5_header.NOPE + value), kv_lora, "bfloat16"],
        "o_proj.qweight": blocks(f"{file}.attn_output.weight", hidden, heads * value),
    }
    if sparse:
        attention |= {
            "indexer.wq_b.weight": [glm5_header.INDEX_HEADS * glm5_header.INDEX_DIM, q_lora, "bfloat16"],
            "indexer.wk_weights_proj.weight": [glm5_header.INDEX_DIM + glm5_header.INDEX_HEADS, hidden, "bfloat16"],
            "indexer.k_norm.weight": [glm5_header.INDEX_DIM, "float32"],
            "indexer.k_norm.bias": [glm5_header.INDEX_DIM, "float32"],
        }
    return {
        "input_layernorm.weight": [hidden, "bfloat16"],
        "post_attention_layernorm.weight": [hidden, "bfloat16"],
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
        **{f"mlp.{name}": shape for name, shape in mlp(layer, size).items()},
    }


def mlp(layer: int, size: int) -> dict[str, Shape]:
    """The parameters of one layer's MLP."""
    hidden, experts = glm5_header.HIDDEN, glm5_header.EXPERTS
    if layer < glm5_header.GLM.dense:
        return gated(f"blk.{layer}.ffn", "", glm5_header.INTERMEDIATE // size)
    part, file = glm5_header.MOE_INTERMEDIATE // size, f"blk.{layer}.ffn"
    shared = gated(file, "_shexp", part)
    return {
        "gate.weight": [experts, hidden, "bfloat16"],
        "gate.e_score_correction_bias": [experts, "float32"],
        "experts.routed_experts.w13_qweight": [experts, *blocks(f"{file}_gate_exps.weight", 2 * part, hidden)],
        "experts.routed_experts.w2_qweight": [experts, *blocks(f"{file}_down_exps.weight", hidden, part)],
        **{f"shared_experts.{name}": shape for name, shape in shared.items()},
    }


def gated(file: str, kind: str, part: int) -> dict[str, Shape]:
    hidden = glm5_header.HIDDEN
    return {
        "gate_up_proj.qweight": {
            "0": blocks(f"{file}_gate{kind}.weight", part, hidden),
            "1": blocks(f"{file}_up{kind}.weight", part, hidden),
        },
        "down_proj.qweight": blocks(f"{file}_down{kind}.weight", hidden, part),
    }


def options(run: str) -> tuple[int, bool]:
    """Ranks, and whether attention is sparse."""
    return (8 if "of 8" in run else 1), run.startswith("sparse")


@pytest.mark.parametrize("run", RUNS)
def test_every_tensor_of_the_file_has_a_place(found: dict[str, Any], run: str) -> None:
    target, draft = (set(found[run][part]["placed"]) for part in ("target", "draft"))
    _, sparse = options(run)
    aside = set() if sparse else {f"blk.{layer}.indexer.{name}" for layer in range(MTP + 1) for name in INDEXER}
    assert target == {name for name in FILE if not name.startswith(f"blk.{MTP}.")} - aside
    assert draft == {name for name in FILE if name.startswith(f"blk.{MTP}.")} - aside


@pytest.mark.parametrize("run", RUNS)
def test_every_parameter_gets_a_tensor(found: dict[str, Any], run: str) -> None:
    target, draft = found[run]["target"], found[run]["draft"]
    assert target["unfilled"] == []
    # The target lends its embeddings and its head to the draft.
    assert {re.sub(r"\.q?weight(_type)?$", "", name) for name in draft["unfilled"]} == {
        "model.embed_tokens",
        f"model.layers.{MTP}.shared_head.head",
    }
    assert (target["expert_layers"], draft["expert_layers"]) == (MTP - glm5_header.GLM.dense, 1)
    assert target["expert_loads"] == draft["expert_loads"] == [3 * glm5_header.EXPERTS]


@pytest.mark.parametrize("run", RUNS)
def test_every_parameter_has_its_shape_on_its_rank(found: dict[str, Any], run: str) -> None:
    size, sparse = options(run)
    rows = glm5_header.VOCABULARY // size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.qweight": blocks("token_embd.weight", rows, glm5_header.HIDDEN),
        "lm_head.qweight": blocks("output.weight", rows, glm5_header.HIDDEN),
        "model.norm.weight": [glm5_header.HIDDEN, "bfloat16"],
    }
    for layer in range(MTP):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in wanted(layer, size, sparse).items()}
    assert found[run]["target"]["shapes"] == shapes


@pytest.mark.parametrize("run", RUNS)
def test_the_draft_has_its_shapes_too(found: dict[str, Any], run: str) -> None:
    size, sparse = options(run)
    prefix, hidden = f"model.layers.{MTP}", glm5_header.HIDDEN
    shapes: dict[str, Shape] = {
        f"{prefix}.{name}.weight": [hidden, "bfloat16"] for name in ("enorm", "hnorm", "shared_head.norm")
    }
    shapes |= {f"{prefix}.mtp_block.{name}": shape for name, shape in wanted(MTP, size, sparse).items()}
    draft = found[run]["draft"]
    filled = {name: shape for name, shape in draft["shapes"].items() if name not in draft["unfilled"]}
    assert filled.pop(f"{prefix}.eh_proj.weight") == [hidden, 2 * hidden, "bfloat16"]
    assert filled == shapes
