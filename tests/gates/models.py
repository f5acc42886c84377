"""Models for the gate's proof. Runs in the stack's interpreter, with the project's root on PYTHONPATH.

    python -m tests.gates.models [--faults | --smollm2 GGUF FOLDER]

Without arguments it reads a job a line from stdin, JSON, and answers each with a line: empty, or what went wrong.

    {"write": path, "fault": name}      the tiny model with a fault of tests/fixtures/tiny_glm/faults.py, dequantized
    {"write": path, "change": {...}}    likewise with one of CHANGES
    {"scramble": path of a safetensors file, "tensor": name}
"""

# The lint environment has no torch, numpy or gguf.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig

from tests.fixtures.tiny_glm import glm_gguf
from tests.fixtures.tiny_glm.faults import FAULTS, HEALTHY, Weights
from tests.fixtures.tiny_glm.shapes import GlmShape

TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny_glm"
SHAPE = GlmShape()


def truncated(weights: Weights, kept: int) -> Weights:
    """No embedding and no output row of the tokens from `kept` on."""
    changed = dict(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        changed[name] = weights[name].clone()
        changed[name][kept:] = 0
    return changed


def garbled(weights: Weights, tensor: str) -> Weights:
    """One tensor's values in another order."""
    values = weights[tensor]
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0))
    return {**weights, tensor: values.flatten()[order].reshape(values.shape)}


def scaled(weights: Weights, tensor: str, factor: float) -> Weights:
    """One tensor's values times a factor, as a wrong block scale makes them."""
    return {**weights, tensor: weights[tensor] * factor}


def rounded(weights: Weights, bits: int) -> Weights:
    """Every matrix rounded to so many bits, a row's largest value being the largest step."""
    changed = {}
    for name, values in weights.items():
        step = values.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        changed[name] = (values / step).round() * step if values.dim() > 1 and ".indexer." not in name else values
    return changed


CHANGES: dict[str, Callable[..., Weights]] = {
    "truncated": truncated,
    "garbled": garbled,
    "scaled": scaled,
    "rounded": rounded,
}


def write_tiny(path: Path, change: Callable[[Weights], Weights]) -> None:
    """The tiny model's dequantized weights, changed, as a GGUF file in float32."""
    state = glm_gguf.read_state(sorted(TINY.glob("*-of-*.gguf")))
    weights = change({name: torch.from_numpy(values) for name, values in state.items()})
    missing = set(SHAPE.parameters()) - set(weights)
    if missing:
        raise ValueError(f"the change lost {sorted(missing)}")
    arrays = {name: np.ascontiguousarray(values.numpy()) for name, values in weights.items()}
    glm_gguf.write_gguf(path, SHAPE, mix=glm_gguf.ALL_F32, state=arrays)


def do(job: dict[str, Any]) -> None:
    """One job of stdin."""
    if "scramble" in job:
        path = Path(job["scramble"])
        save_file(garbled(load_file(path), job["tensor"]), path, metadata={"format": "pt"})
    elif "fault" in job:
        fault = {fault.name: fault for fault in (HEALTHY, *FAULTS)}[job["fault"]]
        if fault is not HEALTHY and fault.weights is HEALTHY.weights:
            raise ValueError(f"{fault.name} is a fault of the engine: the weights are right")
        write_tiny(Path(job["write"]), lambda weights: fault.weights(weights, SHAPE))
    else:
        ((name, arguments),) = job["change"].items()
        write_tiny(Path(job["write"]), lambda weights: CHANGES[name](weights, **arguments))


_SMOLLM2_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_smollm2(source: Path, folder: Path, *, permuted: bool = False) -> None:
    """A Llama GGUF file as a Hugging Face checkpoint in bfloat16, with the tokenizer and template that it holds.

    llama.cpp's converter permutes the rows of q and k (rotary pairs lie side by side); `permuted` leaves them so.
    """
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights: Weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = torch.from_numpy(np.array(values)).reshape([int(size) for size in reversed(tensor.shape)])
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads and not permuted:
            values = values.reshape(heads[part], -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        weights[_llama_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    ends = {name: int(reader.fields[f"tokenizer.ggml.{name}"].contents()) for name in ("bos_token_id", "eos_token_id")}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **ends,
    ).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({**ends, "do_sample": False}), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _llama_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, suffix = name.split(".")
        return f"model.layers.{layer}.{_SMOLLM2_BLOCK[part]}.{suffix}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def main() -> None:
    """Do what the command line says, or the jobs of stdin."""
    if sys.argv[1:2] == ["--faults"]:
        json.dump({fault.name: fault.weights is not HEALTHY.weights for fault in FAULTS}, sys.stdout)
        return
    if sys.argv[1:2] == ["--smollm2"]:
        write_smollm2(Path(sys.argv[2]), Path(sys.argv[3]), permuted="--permuted" in sys.argv)
        return
    for line in sys.stdin:
        try:
            do(json.loads(line))
            print(flush=True)
        except Exception as error:  # the one who asks decides what it means
            print(" ".join(f"{type(error).__name__}: {error}".split()), flush=True)


if __name__ == "__main__":
    main()
