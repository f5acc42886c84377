"""Asks single parts of the patched plugin what they do. Runs in the stack's interpreter.

``check_plugin.py FOLDER`` writes small files into a new folder and prints one line of JSON: the name of each
check and what it found, or the message of the error that it ended in.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, PretrainedConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fixtures.tiny_glm import glm_gguf, shapes

SHAPE = shapes.GlmShape(
    hidden=64, layers=2, heads=2, q_lora=32, kv_lora=64, nope=32, rope=16, value=32, intermediate=64,
    moe_intermediate=32, experts=4, index_heads=2, index_head_dim=32, index_topk=16, mtp_layers=1,
)  # fmt: skip
Names = dict[str, str]


def names_of(path: Path, **changes: Any) -> Names:
    """The name map that the adapter makes of a file, with the shape's config but for some values."""
    from vllm_gguf_plugin.weights_adapter import get_weights_adapter

    config = config_of(**changes)
    adapter = get_weights_adapter(config)
    spec = adapter.prepare_loading(str(path), SimpleNamespace(hf_config=config, quantization=None))
    names: Names = spec.gguf_to_hf_name_map
    return names


def config_of(**changes: Any) -> PretrainedConfig:
    values = {**SHAPE.config(), "index_topk": 0, **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def write(folder: Path, name: str, **options: Any) -> Path:
    """A file of SHAPE in F32, unless the options say otherwise."""
    path = folder / name / "model.gguf"
    path.parent.mkdir()
    glm_gguf.write_gguf(path, options.pop("shape", SHAPE), **{"mix": glm_gguf.ALL_F32, **options})
    return sorted(path.parent.glob("*.gguf"))[0]


def left_aside(folder: Path) -> list[str]:
    """Tensors of a whole file that a dense run without MTP does not load."""
    path = write(folder, "whole")
    return sorted(set(glm_gguf.read_tensors([path])) - set(names_of(path)))


def indexers(folder: Path) -> list[str]:
    """Indexer parameters that a sparse run of GLM-5.2 loads, of a file where only layer 0 has its own."""
    shape = replace(SHAPE, indexer_layers=(True, False), mtp_layers=0)
    path = write(folder, "shared", shape=shape)
    names = names_of(path, index_topk=16, num_nextn_predict_layers=0)
    return sorted(name for name in names.values() if "indexer" in name)


def lite(folder: Path) -> Names:
    """Names of a mixture-of-experts layer of DeepSeek V2 Lite: no q_lora, kv_b in one piece, softmax routing."""
    from vllm_gguf_plugin.weights_adapter.deepseek import layer_names

    config = AutoConfig.for_model("deepseek_v2", q_lora_rank=None, first_k_dense_replace=1, n_shared_experts=2)
    names: Names = layer_names(config, 1, {"blk.1.attn_kv_b.weight"})
    return names


def renamed(folder: Path) -> list[str]:
    """Names under which a quantized weights_proj comes, as a CUDA run reads it."""
    from vllm_gguf_plugin.weight_utils import gguf_quant_weights_iterator

    path = write(folder, "quantized", mix=((r"indexer\.proj", Kind.Q8_0),))
    wanted = {"blk.0.indexer.proj.weight": "model.layers.0.self_attn.indexer.weights_proj.weight"}
    return [name for name, _ in gguf_quant_weights_iterator(path, wanted)]


def shards(folder: Path) -> dict[str, list[int]]:
    """First rows that each of two ranks takes from a fused projection of eight rows, query, and of four, key."""
    from vllm_gguf_plugin.quantization import params

    taken: dict[str, list[int]] = {"gate_up": [], "q": [], "k": []}
    rows = torch.arange(8).reshape(8, 1).to(torch.uint8)
    for rank in range(2):
        params.get_tensor_model_parallel_rank = lambda rank=rank: rank
        for part, last, options in (
            ("gate_up", 8, {"shard_id": 1, "shard_size": 4}),
            ("q", 8, {"shard_id": "q", "shard_size": 4, "num_heads": 1}),
            ("k", 4, {"shard_id": "k", "shard_size": 2, "num_heads": 1}),
        ):
            parameter = params.GGUFUninitializedWeightParameter(requires_grad=False)
            parameter.data_container, parameter.shard_id, parameter.shard_id_map = [], [], {}
            load = parameter.load_merged_column_weight if part == "gate_up" else parameter.load_qkv_weight
            load(rows[:last], **options)
            taken[part].append(int(parameter.data_container[0][0]))
    return taken


def unfilled(folder: Path) -> None:
    """A model that loaded one of its two parameters."""
    from vllm_gguf_plugin.loader import _require_filled

    _require_filled(torch.nn.Linear(2, 2), {"weight"})


def one_half(folder: Path) -> list[str]:
    """A k_b_proj without its v_b_proj."""
    from vllm_gguf_plugin.weights_adapter.mla import merge_kv_b_weights

    return [name for name, _ in merge_kv_b_weights([("a.k_b_proj.weight", torch.zeros(1, 2, 3))])]


def typeless(folder: Path) -> list[str]:
    """A quantized weight that comes without its type."""
    from vllm_gguf_plugin.dequantize import dequantize_weights

    return [name for name, _ in dequantize_weights([("a.qweight", torch.zeros(1))])]


def missing(folder: Path) -> Names:
    """A file without one half of kv_b and without one expert stack."""
    lost = {"blk.0.attn_v_b.weight", "blk.1.ffn_up_exps.weight"}
    return names_of(write(folder, "missing", keep=lambda name: name not in lost))


def missing_split(folder: Path) -> Names:
    """Splits of which the second is not there."""
    first = write(folder, "splits", tensors_per_split=20)
    sorted(first.parent.glob("*.gguf"))[1].unlink()
    return names_of(first)


CHECKS: dict[str, Callable[[Path], Any]] = {
    "left_aside": left_aside,
    "indexers": indexers,
    "lite": lite,
    "renamed": renamed,
    "shards": shards,
    "unfilled": unfilled,
    "one_half": one_half,
    "typeless": typeless,
    "missing": missing,
    "missing_split": missing_split,
    "too_many_layers": lambda folder: names_of(write(folder, "layers"), num_hidden_layers=1),
    "too_many_experts": lambda folder: names_of(write(folder, "experts"), n_routed_experts=6),
}


def main() -> None:
    """Run every check."""
    Path(sys.argv[1]).mkdir(exist_ok=True)
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's own output goes to stderr
    results: dict[str, Any] = {}
    for name, check in CHECKS.items():
        try:
            results[name] = check(Path(sys.argv[1]))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    os.write(out, (json.dumps(results) + "\n").encode())


if __name__ == "__main__":
    main()
