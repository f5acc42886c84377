"""Loads a model as eight ranks and puts their shards together again. Runs in the stack's interpreter.

``check_sharding.py MODEL.gguf RANKS`` prints one line of JSON: for each tensor of the file what the ranks hold of it,
``rows``, ``columns`` or ``every rank``, where that is the whole tensor. config.json lies beside the model. The ranks
are processes with a gloo group that load as vLLM's workers do, through the plugin's quantized layers.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import ranks

Array: TypeAlias = npt.NDArray[Any]
Parameters: TypeAlias = Mapping[str, Array]

Getter: TypeAlias = Callable[[Parameters, str], Array]


def load(model: str, rank: int, size: int, port: int) -> dict[str, Array]:
    """Be one rank: load, and return every parameter; a fused one as its parts, ``name.0`` and ``name.1``."""
    import torch
    from torch.nn.parameter import is_lazy
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader import get_model_loader

    # The CPU packs plain weights for its own kernels and lets go of them.
    UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: None
    with ranks.joined(model, rank, size, port, "float32") as config:
        loaded = get_model_loader(config.load_config).load_model(config, config.model_config)
    arrays: dict[str, Array] = {}
    for name, parameter in loaded.named_parameters():
        if is_lazy(parameter):
            continue
        values = parameter.detach().numpy()
        for number, part in enumerate(getattr(parameter, "parts", ())):
            arrays[f"{name}.{number}"] = values[part.start : part.end].view(np.uint8).reshape(part.shape)
        arrays[name] = values.copy()
    torch.distributed.barrier()
    return arrays


def named(suffix: str) -> Getter:
    """A parameter of a layer."""
    return lambda rank, layer: rank[f"{layer}.{suffix}"]


def fused(module: str, number: int, rows: Sequence[int]) -> Getter:
    """A part of a fused weight; parts of one type lie together, *rows* says how many each has."""

    def get(rank: Parameters, layer: str) -> Array:
        name = f"{layer}.{module}.qweight"
        if f"{name}.1" in rank:
            return rank[f"{name}.{number}"]
        return np.split(rank[f"{name}.0"], [rows[0]])[number]

    return get


def experts(weight: str, number: int | None = None) -> Getter:
    """The stack of a rank's experts; gate and up are the halves of one."""

    def get(rank: Parameters, layer: str) -> Array:
        (name,) = [name for name in rank if name.startswith(f"{layer}.mlp.") and name.endswith(f"{weight}_qweight")]
        return rank[name] if number is None else np.split(rank[name], 2, axis=1)[number]

    return get


def kv_b(config: Mapping[str, Any], half: str) -> Getter:
    """A half of kv_b_proj: [heads, kv_lora, nope], or [heads, value, kv_lora]."""

    def get(rank: Parameters, layer: str) -> Array:
        weight = rank[f"{layer}.self_attn.kv_b_proj.weight"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = weight.reshape(-1, nope + value, config["kv_lora_rank"])
        return heads[:, :nope].transpose(0, 2, 1) if half == "k" else heads[:, nope:]

    return get


def places(config: Mapping[str, Any], size: int) -> dict[str, tuple[str, int, Getter]]:
    """GGUF name of a weight -> what a rank has of it, the axis of that, and where."""
    latent = [config["q_lora_rank"], config["kv_lora_rank"] + config["qk_rope_head_dim"]]
    dense = [config["intermediate_size"] // size] * 2
    shared = [config["moe_intermediate_size"] // size] * 2
    qkv_a, gate_up, shared_gate_up = "self_attn.fused_qkv_a_proj", "mlp.gate_up_proj", "mlp.shared_experts.gate_up_proj"
    return {
        "attn_norm.weight": ("every rank", 0, named("input_layernorm.weight")),
        "ffn_norm.weight": ("every rank", 0, named("post_attention_layernorm.weight")),
        "attn_q_a_norm.weight": ("every rank", 0, named("self_attn.q_a_layernorm.weight")),
        "attn_kv_a_norm.weight": ("every rank", 0, named("self_attn.kv_a_layernorm.weight")),
        "ffn_gate_inp.weight": ("every rank", 0, named("mlp.gate.weight")),
        "exp_probs_b.bias": ("every rank", 0, named("mlp.gate.e_score_correction_bias")),
        "attn_q_a.weight": ("every rank", 0, fused(qkv_a, 0, latent)),
        "attn_kv_a_mqa.weight": ("every rank", 0, fused(qkv_a, 1, latent)),
        "attn_q_b.weight": ("rows", 0, named("self_attn.q_b_proj.qweight")),
        "attn_k_b.weight": ("rows", 0, kv_b(config, "k")),
        "attn_v_b.weight": ("rows", 0, kv_b(config, "v")),
        "attn_output.weight": ("columns", 1, named("self_attn.o_proj.qweight")),
        "ffn_gate.weight": ("rows", 0, fused(gate_up, 0, dense)),
        "ffn_up.weight": ("rows", 0, fused(gate_up, 1, dense)),
        "ffn_down.weight": ("columns", 1, named("mlp.down_proj.qweight")),
        "ffn_gate_shexp.weight": ("rows", 0, fused(shared_gate_up, 0, shared)),
        "ffn_up_shexp.weight": ("rows", 0, fused(shared_gate_up, 1, shared)),
        "ffn_down_shexp.weight": ("columns", 1, named("mlp.shared_experts.down_proj.qweight")),
        "ffn_gate_exps.weight": ("rows", 1, experts("w13", 0)),
        "ffn_up_exps.weight": ("rows", 1, experts("w13", 1)),
        "ffn_down_exps.weight": ("columns", 2, experts("w2")),
    }


def find(tensor: gguf.ReaderTensor, config: Mapping[str, Any], shards: Sequence[Parameters]) -> str:
    """How a tensor of the file was found again."""
    rows = config["vocab_size"] // len(shards)
    outer: dict[str, tuple[str, int, Getter]] = {
        # Padded to a multiple of 64 rows.
        "token_embd.weight": ("rows", 0, lambda rank, _: rank["model.embed_tokens.qweight"][:rows]),
        "output.weight": ("rows", 0, lambda rank, _: rank["lm_head.qweight"][:rows]),
        "output_norm.weight": ("every rank", 0, named("norm.weight")),
    }
    block = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
    layer, name, known = "model", tensor.name, outer
    if block is not None:
        layer, name, known = f"model.layers.{block[1]}", block[2], places(config, len(shards))
    how, axis, get = known[name]
    wanted = tensor.data
    if name in ("attn_k_b.weight", "attn_v_b.weight"):
        wanted = gguf.quants.dequantize(wanted, tensor.tensor_type)
    parts = [get(rank, layer) for rank in shards]
    if how == "every rank":
        return how if all(same(wanted, part) for part in parts) else "a rank has something else"
    return how if same(wanted, np.concatenate(parts, axis)) else "not found again"


def same(wanted: Array, found: Array) -> bool:
    return wanted.shape == found.shape and bool(np.array_equal(wanted, found))


def main() -> None:
    """Load every rank and print what became of each tensor."""
    model, size = sys.argv[1], int(sys.argv[2])
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's own output goes to stderr
    shards = ranks.run(load, model, size)
    config = json.loads(Path(model).with_name("config.json").read_text())
    tensors = gguf.GGUFReader(model).tensors
    found = {tensor.name: find(tensor, config, shards) for tensor in tensors if ".indexer." not in tensor.name}
    os.write(out, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main()
