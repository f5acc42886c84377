"""GLM-5 of the real size: every tensor of the file has a place, every parameter gets a tensor of its shape.

The names are vLLM's, from its own models; the shapes are worked out here from the file's header, rank by rank.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from conftest import ROOT, Stack

sys.path.extend([str(ROOT), str(ROOT / "tests/unit")])
from gguf_writer import Data
from octoserve.gguf import GGML_TYPES

from tests.fixtures import glm5_header as glm

Shape: TypeAlias = list[Any] | dict[str, list[Any]]

LAYERS, DENSE = glm.GLM.layers, glm.GLM.dense
MTP = f"blk.{LAYERS}."
INDEXER = ("attn_k.weight", "attn_q_b.weight", "k_norm.bias", "k_norm.weight", "proj.weight")


@dataclass(frozen=True)
class Run:
    """What one of `size` ranks is to hold of a file; shapes end with the type, shards have their number."""

    file: dict[str, Data]
    size: int
    sparse: bool

    def blocks(self, name: str, rows: int, columns: int) -> list[Any]:
        """So many rows of a quantized tensor, in bytes as they lie in the file."""
        kind, elements, size = GGML_TYPES[self.file[name].kind]
        assert kind != "F32", name
        assert columns % elements == 0, f"{name}: {columns} columns end within a block of {elements}"
        return [rows, columns // elements * size, "uint8"]

    def layer(self, layer: int) -> dict[str, Shape]:
        """The parameters of one layer."""
        parts = {f"self_attn.{name}": shape for name, shape in self.attention(layer).items()}
        parts |= {f"mlp.{name}": shape for name, shape in self.mlp(layer).items()}
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        return {**parts, **{name: [glm.HIDDEN, "bfloat16"] for name in norms}}

    def attention(self, layer: int) -> dict[str, Shape]:
        """The parameters of one layer's attention."""
        file, heads = f"blk.{layer}.attn", glm.HEADS // self.size
        parts: dict[str, Shape] = {
            "fused_qkv_a_proj.qweight": {
                "0": self.blocks(f"{file}_q_a.weight", glm.Q_LORA, glm.HIDDEN),
                "1": self.blocks(f"{file}_kv_a_mqa.weight", glm.KV_LORA + glm.ROPE, glm.HIDDEN),
            },
            "q_a_layernorm.weight": [glm.Q_LORA, "bfloat16"],
            "q_b_proj.qweight": self.blocks(f"{file}_q_b.weight", heads * (glm.NOPE + glm.ROPE), glm.Q_LORA),
            "kv_a_layernorm.weight": [glm.KV_LORA, "bfloat16"],
            "kv_b_proj.weight": [heads * (glm.NOPE + glm.VALUE), glm.KV_LORA, "bfloat16"],
            "o_proj.qweight": self.blocks(f"{file}_output.weight", glm.HIDDEN, heads * glm.VALUE),
        }
        if self.sparse:
            parts |= {
                "indexer.wq_b.weight": [glm.INDEX_HEADS * glm.INDEX_DIM, glm.Q_LORA, "bfloat16"],
                "indexer.wk_weights_proj.weight": [glm.INDEX_DIM + glm.INDEX_HEADS, glm.HIDDEN, "bfloat16"],
                "indexer.k_norm.weight": [glm.INDEX_DIM, "float32"],
                "indexer.k_norm.bias": [glm.INDEX_DIM, "float32"],
            }
        return parts

    def mlp(self, layer: int) -> dict[str, Shape]:
        """The parameters of one layer's MLP."""
        file, part = f"blk.{layer}.ffn", glm.MOE_INTERMEDIATE // self.size
        if layer < DENSE:
            return self.gated(file, "", glm.INTERMEDIATE // self.size)
        down = self.blocks(f"{file}_down_exps.weight", glm.HIDDEN, part)
        return {
            "gate.weight": [glm.EXPERTS, glm.HIDDEN, "bfloat16"],
            "gate.e_score_correction_bias": [glm.EXPERTS, "float32"],
            "experts.routed_experts.w13_qweight": [
                glm.EXPERTS,
                *self.blocks(f"{file}_gate_exps.weight", 2 * part, glm.HIDDEN),
            ],
            "experts.routed_experts.w2_qweight": [glm.EXPERTS, *down],
            **{f"shared_experts.{name}": shape for name, shape in self.gated(file, "_shexp", part).items()},
        }

    def gated(self, file: str, kind: str, part: int) -> dict[str, Shape]:
        """The parameters of a gated MLP, of which a rank has a part of the intermediate values."""
        return {
            "gate_up_proj.qweight": {
                "0": self.blocks(f"{file}_gate{kind}.weight", part, glm.HIDDEN),
                "1": self.blocks(f"{file}_up{kind}.weight", part, glm.HIDDEN),
            },
            "down_proj.qweight": self.blocks(f"{file}_down{kind}.weight", glm.HIDDEN, part),
        }


RUNS = {
    "GLM-5, sparse, 1 rank": Run(glm.tensors(glm.GLM_5), 1, sparse=True),
    "GLM-5.2, dense, last of 8 ranks": Run(glm.tensors(glm.GLM_5_2), 8, sparse=False),
}
each_run = pytest.mark.parametrize(("name", "run"), RUNS.items(), ids=RUNS)


@pytest.fixture(scope="module")
def found(patched: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = patched.run("check_glm5_header.py", str(tmp_path_factory.mktemp("glm5")))
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert result.keys() == RUNS.keys()
    return result


@each_run
def test_every_tensor_of_the_file_has_a_place(found: dict[str, Any], name: str, run: Run) -> None:
    target, draft = (set(found[name][part]["placed"]) for part in ("target", "draft"))
    indexers = {f"blk.{layer}.indexer.{part}" for layer in range(LAYERS + 1) for part in INDEXER}
    placed = run.file.keys() - (set() if run.sparse else indexers)
    assert target == {tensor for tensor in placed if not tensor.startswith(MTP)}
    assert draft == {tensor for tensor in placed if tensor.startswith(MTP)}


@each_run
def test_every_parameter_gets_a_tensor(found: dict[str, Any], name: str, run: Run) -> None:
    target, draft = found[name]["target"], found[name]["draft"]
    assert target["unfilled"] == []
    # The target lends its embeddings and its head to the draft.
    assert {re.sub(r"\.q?weight(_type)?$", "", parameter) for parameter in draft["unfilled"]} == {
        "model.embed_tokens",
        f"model.layers.{LAYERS}.shared_head.head",
    }
    assert (target["expert_layers"], draft["expert_layers"]) == (LAYERS - DENSE, 1)
    assert target["expert_loads"] == draft["expert_loads"] == [3 * glm.EXPERTS]


@each_run
def test_every_parameter_has_its_shape_on_its_rank(found: dict[str, Any], name: str, run: Run) -> None:
    rows = glm.VOCABULARY // run.size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.qweight": run.blocks("token_embd.weight", rows, glm.HIDDEN),
        "lm_head.qweight": run.blocks("output.weight", rows, glm.HIDDEN),
        "model.norm.weight": [glm.HIDDEN, "bfloat16"],
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in run.layer(layer).items()}
    assert found[name]["target"]["shapes"] == shapes


@each_run
def test_the_draft_has_its_shapes_too(found: dict[str, Any], name: str, run: Run) -> None:
    draft, prefix = found[name]["draft"], f"model.layers.{LAYERS}"
    norms = ("enorm", "hnorm", "shared_head.norm")
    shapes: dict[str, Shape] = {f"{prefix}.{part}.weight": [glm.HIDDEN, "bfloat16"] for part in norms}
    shapes |= {f"{prefix}.mtp_block.{part}": shape for part, shape in run.layer(LAYERS).items()}
    filled = {part: shape for part, shape in draft["shapes"].items() if part not in draft["unfilled"]}
    # No tensor-parallel layer, so no quantized one either.
    assert filled.pop(f"{prefix}.eh_proj.weight") == [glm.HIDDEN, 2 * glm.HIDDEN, "bfloat16"]
    assert filled == shapes
