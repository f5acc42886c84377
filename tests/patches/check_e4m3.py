"""The kernels that write the indexer's keys and queries, for a GPU before SM89. Runs in the stack's interpreter.

The first argument is the folder of the patched stack. With TRITON_INTERPRET=1, prints a line of JSON that says how
many of many floats are rounded otherwise than by torch, and whether the kernels wrote what they were to; with
``--compile``, what they need on SM80 and SM86, or why they do not compile there.
"""

# ruff: noqa: E402
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from compile_ahead import compile_one
from triton.backends import backends

COMPILES = "--compile" in sys.argv
E4M3 = torch.float8_e4m3fn
TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", E4M3: "*fp8e4nv", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip
# vLLM takes Triton on a CPU build only with a backend for it, which the interpreter does without.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")  # the CPU build has none

from vllm import platforms
from vllm.platforms import cuda
from vllm.platforms.interface import DeviceCapability

cuda.CudaPlatform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(8, 0))
platforms._current_platform = cuda.CudaPlatform()


def load(site: Path) -> ModuleType:
    """The kernels' module alone: its package imports what a CPU build has not, of which SM80 would use nothing."""
    package = "vllm.models.deepseek_v32"
    for name in (package, f"{package}.nvidia", f"{package}.nvidia.ops", f"{package}.nvidia.ops.fused_q_cutedsl"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(fused_q_cutedsl=None, is_fused_q_cutedsl_supported=lambda *_, **__: False)
    path = site / "vllm/models/deepseek_v32/common/kernels.py"
    spec = importlib.util.spec_from_file_location("deepseek_v32_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


KERNELS = load(Path(sys.argv[1]))
del backends["cpu"]  # the compiler asks each for its own
round_to_e4m3 = getattr(KERNELS, "_e4m3_bits", None)


@triton.jit  # type: ignore[untyped-decorator]
def bits_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + places, round_to_e4m3(tl.load(x_ptr + places)))


def rounded_otherwise() -> int:
    """Among floats of all sizes, all of e4m3, what lies half way between those, and its neighbours."""
    random = torch.Generator().manual_seed(0)
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = values[values.isfinite()].unique()
    halves = (values[1:] + values[:-1]) / 2
    edges = torch.cat([values, halves, torch.tensor([448.0, 464.0, 500.0, 1e30, 1e-30, 0.0])])
    edges = torch.cat([edges, torch.nextafter(edges, torch.tensor(1e38)), torch.nextafter(edges, torch.tensor(-1e38))])
    sizes = torch.randint(-20, 9, (2**16,), generator=random).float().exp2()
    x = torch.cat([edges, -edges, torch.randn(2**16, generator=random) * sizes])
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    out = torch.empty(len(x), dtype=torch.uint8)
    bits_kernel[(len(x) // 1024,)](x, out, 1024)
    return int((out != x.clamp(-448, 448).to(E4M3).view(torch.uint8)).sum())


def arguments(tokens: int = 5, heads: int = 3) -> tuple[list[Any], dict[str, Any], list[Any], dict[str, Any]]:
    """What fused_norm_rope and fused_q take. At every position the rotation is none, so that answers are simple."""
    random = torch.Generator().manual_seed(1)

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    still = torch.cat([torch.ones(8, 32), torch.zeros(8, 32)], dim=1)
    positions = torch.arange(tokens)
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8)
    norm_rope = [
        positions, bf16(tokens, 256), torch.ones(256).bfloat16(), 1e-6, bf16(tokens, 512), torch.ones(512).bfloat16(),
        1e-6, bf16(tokens, 64), still, bf16(tokens, 128), torch.rand(128, generator=random) + 0.5,
        torch.randn(128, generator=random), 1e-6, still, torch.zeros(tokens, 128, dtype=torch.int32),
    ]  # fmt: skip
    caches = {
        "slot_mapping": torch.tensor([3, 64, 127, 0, 70]), "indexer_k_cache": cache,
        "mla_kv_cache": torch.zeros(2, 64, 576).bfloat16(), "kv_c_out": bf16(tokens, 512), "k_pe_out": bf16(tokens, 64),
    }  # fmt: skip
    query = [
        positions, bf16(tokens, 2, 64), still, bf16(tokens, heads, 128), still, bf16(tokens, 2, 512),
        torch.ones(1), bf16(tokens, heads), 0.1, 0.2,
    ]  # fmt: skip
    return norm_rope, caches, query, {"quantize_mqa": False}


def differs(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of the values of rows [n, 128] that are not e4m3 of `wanted` by a scale that is a power of two."""
    scale = torch.exp2(torch.ceil(torch.log2(wanted.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return float((found.view(torch.uint8) != (wanted / scale).to(E4M3).view(torch.uint8)).float().mean())


def run() -> dict[str, Any]:
    norm_rope, caches, query, options = arguments()
    KERNELS.fused_norm_rope(*norm_rope, **caches)
    index_k, weight, bias = norm_rope[9].float(), norm_rope[10], norm_rope[11]
    wanted = torch.nn.functional.layer_norm(index_k, (128,), weight, bias, 1e-6)
    pages = caches["indexer_k_cache"].flatten(1)[:, : 64 * 128].reshape(-1, 128)
    q, _, _ = KERNELS.fused_q(*query, **options)
    return {
        "rounded_otherwise": rounded_otherwise(),
        "keys": differs(pages[caches["slot_mapping"]], wanted),
        "queries": differs(q, query[3].float()),
        "queries_are": str(q.dtype),
    }


def compile_launches() -> dict[str, Any]:
    """Catch what would be launched, and compile it."""
    found: dict[str, Any] = {}

    class Caught:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getitem__(self, _grid: Any) -> Any:
            return self.launch

        def launch(self, *given: Any, num_warps: int = 4, **named: Any) -> None:
            parameters = self.function.params
            values = {**dict(zip((parameter.name for parameter in parameters), given, strict=False)), **named}
            constants = {p.name: values[p.name] for p in parameters if p.is_constexpr or values[p.name] is None}
            types = {
                name: TYPES[value.dtype] if isinstance(value, torch.Tensor) else "fp32"
                for name, value in values.items()
                if isinstance(value, (torch.Tensor, float)) and name not in constants
            }
            for capability in (80, 86):
                try:
                    made = compile_one(self.function, capability, types, constants, num_warps=num_warps)
                except Exception as error:
                    made = {"error": f"{type(error).__name__}: {error}"}
                found[f"{self.function.__name__} sm{capability}"] = made

    for name in ("_fused_norm_rope_kernel", "_fused_q_kernel"):
        setattr(KERNELS, name, Caught(getattr(KERNELS, name)))
    norm_rope, caches, query, options = arguments()
    KERNELS.fused_norm_rope(*norm_rope, **caches)
    KERNELS.fused_q(*query, **options)
    return found


print(json.dumps(compile_launches() if COMPILES else run()))
