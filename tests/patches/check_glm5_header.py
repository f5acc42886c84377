"""Loads a GLM-5 of the real size, header true and without data, into models without storage. Runs in the stack's
interpreter.

``check_glm5_header.py FOLDER`` prints one line of JSON: for each run of RUNS which tensors of the file the target and
the draft (MTP) have a place for, and the shape of each parameter after loading: vLLM's own model, the plugin's own
loaders, one rank. Parameters lie on the `meta` device, so that nothing is copied.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import torch
from torch.nn.parameter import is_lazy

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "module_utils"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from tests.fixtures import glm5_header
from tests.fixtures.tiny_glm.shapes import GlmShape

#: Name -> types, index_topk, tensor-parallel size, rank.
RUNS = {
    "GLM-5, sparse, 1 rank": (glm5_header.GLM_5, 2048, 1, 0),
    "GLM-5.2, dense, last of 8 ranks": (glm5_header.GLM_5_2, 0, 8, 7),
}
SHAPE = GlmShape(
    vocabulary=glm5_header.VOCABULARY, hidden=glm5_header.HIDDEN, layers=glm5_header.GLM.layers,
    dense_layers=glm5_header.GLM.dense, mtp_layers=glm5_header.GLM.mtp, heads=glm5_header.HEADS,
    q_lora=glm5_header.Q_LORA, intermediate=glm5_header.INTERMEDIATE, moe_intermediate=glm5_header.MOE_INTERMEDIATE,
    experts=glm5_header.EXPERTS, experts_per_token=8,
)  # fmt: skip

_expert_loads: Counter[str] = Counter()


def prepare_stack() -> None:
    """No backend of sparse attention is asked for, the header is read once, the hole not at all, and loads of experts
    are counted."""
    import vllm_gguf_plugin  # noqa: F401  may derive from the reader, so before that is replaced
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    choose = mla_attention.get_attn_backend
    # The CPU has no sparse backend; parameters are the same with another.
    mla_attention.get_attn_backend = lambda *args, **options: choose(*args, **{**options, "use_sparse": False})
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    os.preadv = lambda *args: 0  # reading ahead takes it
    load = RoutedExperts.weight_loader

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        _expert_loads[self.layer_name] += 1
        return load(self, *args, **options)

    RoutedExperts.weight_loader = counted


def build(config: Any, model_config: Any, unquantized: list[str]) -> torch.nn.Module:
    """The model without storage, but for the types of weights, whose values the loader reads."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.quant_config.unquantized_modules[:] = unquantized
    with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
        model: torch.nn.Module = initialize_model(vllm_config=config, model_config=model_config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("_type"):
                fresh = type(parameter)(requires_grad=False, device="cpu")
                fresh.__dict__.update(parameter.__dict__)
                module.register_parameter(name, fresh)
    return model


def shape_of(parameter: Any) -> Any:
    """Shape and type; of a fused layer that waits for its shards, those of each, in logical order."""
    if not is_lazy(parameter):
        return [*parameter.shape, str(parameter.dtype).removeprefix("torch.")]
    shards = zip(parameter.shard_id, parameter.data_container)
    return {str(shard): shape_of(tensor) for shard, tensor in sorted(shards, key=lambda item: str(item[0]))}


def load(loader: Any, config: Any, model_config: Any) -> dict[str, Any]:
    """Load one model; what has a place, what was filled, and the shapes."""
    adapter = loader._prepare_adapter(model_config)
    model = build(config, model_config, adapter.load_spec.unquantized_modules)
    _expert_loads.clear()
    loaded = model.load_weights(adapter.prepare_weights(model_config))
    parameters = dict(model.named_parameters())
    return {
        "placed": sorted(adapter.load_spec.gguf_to_hf_name_map),
        "unfilled": sorted(parameters.keys() - loaded),
        "expert_loads": sorted(set(_expert_loads.values())),
        "expert_layers": len(_expert_loads),
        "shapes": {name: shape_of(item) for name, item in parameters.items() if not name.endswith("_type")},
    }


def run(folder: Path, mix: glm5_header.TypeMix, topk: int, size: int, rank: int) -> dict[str, Any]:
    """Target and draft as one rank of so many, of a file that is removed again."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    path = glm5_header.write(folder / f"of-{size}.gguf", mix)
    config = EngineArgs(
        model=str(path),
        hf_config_path=str(folder),
        hf_overrides={"index_topk": topk},
        quantization="gguf",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"},
        attention_backend="CPU_MLA",  # AMX_MLA, the choice of a CPU with AMX, takes no indexer
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
    ).create_engine_config()
    draft = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            parallel_state.initialize_model_parallel(1)
        group = parallel_state.get_tp_group()
        group.world_size, group.rank_in_group = size, rank
        config.parallel_config.tensor_parallel_size = size
        loader = get_model_loader(config.load_config)
        target = load(loader, config, config.model_config)
        draft.model_weights = config.model_config.model_weights
        found = {"target": target, "draft": load(loader, config, draft)}
    path.unlink()
    return found


def main() -> None:
    """Write the file, do the runs and print."""
    folder = Path(sys.argv[1])
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's own output goes to stderr
    (folder / "config.json").write_text(json.dumps(SHAPE.config()), encoding="utf-8")
    prepare_stack()
    results = {name: run(folder, *options) for name, options in RUNS.items()}
    os.write(out, (json.dumps(results) + "\n").encode())


if __name__ == "__main__":
    main()
