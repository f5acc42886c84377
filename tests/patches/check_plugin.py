"""Asks single parts of the patched plugin what they do. Runs in the stack's interpreter.

``check_plugin.py FOLDER`` writes small files into a new folder and prints one line of JSON: the name of each
check and what it found, or the message of the error that it ended in.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
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


def adapter_of(path: Path, quantization: str | None = None, patterns: Sequence[str] = (), **changes: Any) -> Any:
    """The adapter that is ready to load a file, with the shape's config but for some values."""
    from vllm_gguf_plugin.weights_adapter import get_weights_adapter

    config = config_of(**changes)
    adapter = get_weights_adapter(config)
    adapter.dequantize_patterns = list(patterns)
    adapter.prepare_loading(str(path), SimpleNamespace(hf_config=config, quantization=quantization))
    return adapter


def names_of(path: Path, **changes: Any) -> Names:
    """The name map of that adapter."""
    names: Names = adapter_of(path, **changes).load_spec.gguf_to_hf_name_map
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


def shorten(path: Path) -> Path:
    """The file without its last bytes."""
    os.truncate(path, path.stat().st_size - 20_000)
    return path


def left_aside(folder: Path) -> list[str]:
    """Tensors of a whole file that a dense run without MTP does not load."""
    path = write(folder, "whole")
    return sorted(set(glm_gguf.read_tensors([path])) - set(names_of(path)))


def indexers(folder: Path) -> list[str]:
    """Indexer parameters that a sparse run of GLM-5.2 loads, of a file where only layer 0 has its own."""
    shape = replace(SHAPE, indexer_layers=(True, False), mtp_layers=0)
    path = write(folder, "shared", shape=shape)
    names = names_of(path, index_topk=16, num_nextn_predict_layers=0, indexer_types=["full", "shared"])
    return sorted(name for name in names.values() if "indexer" in name)


def draft(folder: Path) -> list[str]:
    """Parameters of a draft: those of the MTP block."""
    path = write(folder, "draft")
    config = config_of()
    config.update({"model_type": "deepseek_mtp"})
    from vllm_gguf_plugin.weights_adapter import get_weights_adapter

    adapter = get_weights_adapter(config)
    spec = adapter.prepare_loading(str(path), SimpleNamespace(hf_config=config, quantization=None))
    return sorted(spec.gguf_to_hf_name_map.values())


def unquantized(folder: Path) -> list[str]:
    """Modules of layer 0 that a GPU has without quantization, of a file in Q8_0, where the user names one."""
    path = write(folder, "plain", mix=((r"^blk\.\d+\.(attn|indexer|ffn).*(_|\.)[a-z]+\.weight", Kind.Q8_0),))
    adapter = adapter_of(path, quantization="gguf", patterns=[r"layers\.0\..*o_proj"], index_topk=16)
    modules = adapter.load_spec.unquantized_modules
    return sorted(name.removeprefix("model.layers.0.") for name in modules if ".layers.0." in name)


def layouts(folder: Path) -> dict[str, Any]:
    """What is dequantized, or why it cannot be served, at two ranks."""
    from vllm_gguf_plugin.weights_adapter.layout import Weight, modules_to_dequantize

    def layout(*weights: tuple[str, Kind, int], wanted: str = "indexer.wq_b", experts: int = 2) -> Any:
        built = [Weight(f"{name}'s tensor", f"0.{name}", kind, (256, columns)) for name, kind, columns in weights]
        try:
            return sorted(modules_to_dequantize(built, 2, experts, lambda module: module.endswith(wanted)))
        except ValueError as error:
            return str(error)

    gate, up, down = "experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"
    return {
        "fits": layout(
            ("o_proj", Kind.Q4_K, 512), (gate, Kind.Q4_K, 256), (up, Kind.Q4_K, 256), (down, Kind.Q6_K, 512)
        ),
        "wanted": layout(("indexer.wq_b", Kind.Q4_K, 256), ("indexer.wk", Kind.F32, 256)),
        "cut": layout(("o_proj", Kind.Q4_K, 256), ("q_b_proj", Kind.Q4_K, 256), ("down_proj", Kind.Q8_0, 96)),
        "no_kernel": layout(("q_b_proj", Kind.TQ1_0, 256)),
        "no_kernel_at_all": layout(("q_b_proj", Kind.Q8_K, 256)),
        "partly_quantized": layout(("q_a_proj", Kind.Q8_0, 256), ("kv_a_proj_with_mqa", Kind.BF16, 256)),
        "plain_experts": layout((gate, Kind.BF16, 256), (up, Kind.BF16, 256), (down, Kind.F16, 256)),
        "partly_plain_experts": layout((gate, Kind.Q8_0, 256), (up, Kind.Q8_0, 256), (down, Kind.F16, 256)),
        "cut_experts": layout((gate, Kind.Q4_K, 256), (up, Kind.Q4_K, 256), (down, Kind.Q6_K, 256)),
        "half_a_stack": layout(
            (gate, Kind.Q4_K, 256), (up, Kind.Q4_K, 256), (down, Kind.Q6_K, 512), wanted="down_proj"
        ),
        "experts_over_more_ranks": layout(
            (gate, Kind.Q8_0, 256), (up, Kind.Q8_0, 256), (down, Kind.Q8_0, 64), ("down_proj", Kind.Q8_0, 64), experts=4
        ),
        "two_types": layout((gate, Kind.Q4_K, 256), (up, Kind.Q5_K, 256), (down, Kind.Q6_K, 512)),
    }


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


def fused(folder: Path) -> dict[str, Any]:
    """What the kernel is given for two shards of different types that came in reversed order."""
    from vllm.model_executor import parameter
    from vllm_gguf_plugin import quantization
    from vllm_gguf_plugin.quantization import linear

    parameter.get_tensor_model_parallel_rank = parameter.get_tensor_model_parallel_world_size = lambda: 1
    layer = torch.nn.Module()
    method = linear.GGUFLinearMethod(None)
    method.create_weights(layer, 64, [2, 3], 64, 5, torch.float32, weight_loader=print)
    for shard, rows, size, kind in ((1, 3, 68, Kind.Q8_0), (0, 2, 36, Kind.Q4_0)):
        layer.qweight_type._store(torch.tensor(kind), shard)
        layer.qweight._store(torch.full((rows, size), shard, dtype=torch.uint8), shard)
    method.process_weights_after_loading(layer)
    weights: list[torch.Tensor] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, kind: int) -> torch.Tensor:
        weights.append(weight)
        return x

    quantization.fused_mul_mat_gguf = multiply
    method.apply(layer, torch.zeros(1, 64))
    start, end = layer.qweight.data_ptr(), layer.qweight.data_ptr() + layer.qweight.nbytes
    return {
        "shapes": [list(weight.shape) for weight in weights],
        "values": [int(weight.unique()) for weight in weights],
        "in_place": all(weight.is_contiguous() and start <= weight.data_ptr() < end for weight in weights),
    }


def mapped(folder: Path) -> bool:
    """Whether every tensor that the iterator yields is a part of the mapped file."""
    from vllm_gguf_plugin.weight_utils import gguf_quant_weights_iterator

    path = write(folder, "mapped", mix=((r"ffn", Kind.Q8_0), (r"attn_output", Kind.BF16)))
    tensors = [tensor for _, tensor in gguf_quant_weights_iterator(path, None) if tensor.ndim]
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    ranges = [tuple(int(number, 16) for number in line[0].split("-")) for line in lines]
    return bool(tensors) and all(any(start <= tensor.data_ptr() < end for start, end in ranges) for tensor in tensors)


def shares(folder: Path) -> list[list[int]]:
    """First byte and number of bytes of each read of two ranks, of two tensors in a file."""
    from vllm_gguf_plugin import reading

    path = folder / "shares"
    path.write_bytes(bytes(100))
    reads: list[list[int]] = []
    reading._BLOCK = 16
    reading.os = SimpleNamespace(
        open=os.open,
        close=os.close,
        O_RDONLY=os.O_RDONLY,
        preadv=lambda descriptor, buffers, offset: reads.append([offset, len(buffers[0])]),
    )
    for rank in range(2):
        ahead = reading.ReadAhead([reading.Extent(str(path), 10, 40), reading.Extent(str(path), 60, 8)], rank, 2)
        ahead._thread.join()
    return reads


def progress(folder: Path) -> list[str]:
    """Lines of a load of 3 GB in three steps, of 4 s, 4 s and 2 s."""
    from vllm_gguf_plugin import reading

    clock = iter([0.0, 4.0, 8.0, 10.0])
    lines: list[str] = []
    reading.logger = SimpleNamespace(info=lambda text, line: lines.append(line))
    shown = reading.Progress(3_000_000_000, clock=lambda: next(clock))
    for _ in range(3):
        shown.advance(1_000_000_000)
    return lines


def no_kernels(folder: Path) -> None:
    """A GPU on which the plugin's kernels do not load."""
    from vllm_gguf_plugin import ops
    from vllm_gguf_plugin.quantization import GGUFConfig

    released = ops.current_platform, ops._IMPORT_ERROR
    ops.current_platform, ops._IMPORT_ERROR = SimpleNamespace(is_cuda=lambda: True), ImportError("undefined symbol")
    try:
        GGUFConfig()
    finally:
        ops.current_platform, ops._IMPORT_ERROR = released


def expert_parallel(folder: Path) -> None:
    """Quantized experts that are spread over ranks."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm_gguf_plugin.quantization import GGUFConfig

    layer = RoutedExperts.__new__(RoutedExperts)
    layer.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_ep=True))
    GGUFConfig().get_quant_method(layer, "model.layers.3.mlp.experts")


def extra_config(folder: Path) -> None:
    """An option of the loader that it does not know."""
    from vllm.config.load import LoadConfig
    from vllm_gguf_plugin.loader import GGUFModelLoader

    GGUFModelLoader(LoadConfig(load_format="gguf", model_loader_extra_config={"dequantise": ["o_proj"]}))


def unfilled(folder: Path) -> None:
    """A model that loaded one of its two parameters."""
    from vllm_gguf_plugin.loader import _require_filled

    _require_filled(torch.nn.Linear(2, 2), {"weight"}, SimpleNamespace(hf_config=config_of()))


def one_half(folder: Path) -> list[str]:
    """A k_b_proj without its v_b_proj."""
    from vllm_gguf_plugin.weights_adapter.mla import merge_kv_b_weights

    return [name for name, _ in merge_kv_b_weights([("a.k_b_proj.weight", torch.zeros(1, 2, 3))])]


def typeless(folder: Path) -> list[str]:
    """A quantized weight that comes without its type."""
    from vllm_gguf_plugin.dequantize import dequantize_weights

    return [name for name, _ in dequantize_weights([("a.qweight", torch.zeros(1))], lambda module: True)]


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
    "draft": draft,
    "unquantized": unquantized,
    "layouts": layouts,
    "renamed": renamed,
    "shards": shards,
    "fused": fused,
    "mapped": mapped,
    "shares": shares,
    "progress": progress,
    "no_kernels": no_kernels,
    "expert_parallel": expert_parallel,
    "extra_config": extra_config,
    "unfilled": unfilled,
    "one_half": one_half,
    "typeless": typeless,
    "missing": missing,
    "missing_split": missing_split,
    "too_many_layers": lambda folder: names_of(write(folder, "layers"), num_hidden_layers=1),
    "no_indexer": lambda folder: names_of(
        write(folder, "no_indexer", keep=lambda name: "blk.1.indexer" not in name), index_topk=16
    ),
    "other_heads": lambda folder: names_of(write(folder, "heads"), num_attention_heads=4),
    "damaged": lambda folder: names_of(shorten(write(folder, "damaged"))),
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
