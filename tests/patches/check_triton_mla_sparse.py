"""Runs and compiles the sparse MLA kernel on a CPU. Runs in the stack's interpreter.

Answers each line of its input, a JSON object that names the kernel's file, by one line of JSON: batches (what
sparse_kernel.make takes) by how far each answer is from the reference; with ``--compile``, a compute capability by the
shared memory and the registers of every configuration that can be selected for it.
"""

# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import numpy as np
import sparse_kernel
import torch
import triton.language as tl
from compile_ahead import compile_one
from kernel_lines import COMPILES, answer_all
from triton.runtime import interpreter


def mend_interpreter() -> None:
    """The interpreter keeps bfloat16 as 16-bit integers: it multiplies matrices of them as integers, and cuts off
    where a GPU rounds to the nearest."""
    multiply, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widen(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, widen(a), widen(b), *others)

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, rounding)
        return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._convert_float = convert_float


def run(kernel: ModuleType, case: dict[str, Any]) -> dict[str, Any]:
    """Run one or two batches through the same buffers, filled with NaN before the first."""
    options = case["run"]
    batches = []
    for shape in case["batches"]:
        dtype = getattr(torch, shape["dtype"])
        batches.append(sparse_kernel.make(**{**shape, "dtype": dtype}))
    heads, dtype = case["batches"][0]["heads"], batches[0].kv.dtype
    most = max(shape["tokens"] for shape in case["batches"])
    # One token and one head more than there are, and columns behind: what lies beside `out` must stay as it is.
    buffer = torch.full((most + 1, heads + 1, sparse_kernel.LATENT + 16), float("nan"), dtype=dtype)
    lse_buffer = torch.full((most + 1, heads + 1), float("nan"))
    config = options["config"] and kernel.SparseMLAConfig(*options["config"])
    found: dict[str, Any] = {"errors": [], "lse_errors": [], "bound": sparse_kernel.BOUNDS[dtype]}
    for batch in batches:
        tokens = len(batch.indices)
        out = buffer[:tokens, :heads, : sparse_kernel.LATENT]
        lse = lse_buffer[:tokens, :heads] if options["lse"] else None
        kernel.sparse_mla_attention(
            batch.q, batch.kv, batch.indices, batch.scale, out, lse, batch.counts,
            config=config, num_splits=options["num_splits"],
        )  # fmt: skip
        wanted, wanted_lse = sparse_kernel.reference(batch)
        found["errors"].append(sparse_kernel.error(out, wanted))
        if lse is not None:
            same = (lse == wanted_lse) | ((lse - wanted_lse).abs() <= 1e-4)
            found["lse_errors"].append(0.0 if bool(same.all()) else float("inf"))
    buffer[:most, :heads, : sparse_kernel.LATENT] = float("nan")
    found["beside_untouched"] = bool(buffer.isnan().all())
    return found


def compile_all(kernel: ModuleType, capability: int) -> list[dict[str, Any]]:
    """Compile what can be selected there, as ptxas leaves it: a full block of heads, bf16, flat rows, counts, whole and
    in splits; and in splits 8 heads, as GLM-5 has on one of eight cards, fp16, pages apart, no counts."""
    for tokens, heads in itertools.product((1, 2, 8, 31, 66, 128, 264, 1000, 8192), (8, 16, 20, 32, 64, 128)):
        for multiprocessors in (84, 108, 132, 188):
            config = kernel.select_config(capability, multiprocessors, tokens, heads)
            splits = kernel.select_num_splits(config, multiprocessors, tokens, heads, 2048)
            assert config in kernel.configs_of(capability)
            assert 1 <= splits <= 64
    found = []
    for config in kernel.configs_of(capability):
        for split, heads, kind, page_size, counted in (
            (False, config.block_h, "bf16", 0, True),
            (True, config.block_h, "bf16", 0, True),
            (True, 8, "fp16", 64, False),
        ):
            made = compile_one(
                kernel._sparse_mla_kernel,
                capability,
                {
                    **dict.fromkeys(("q_latent_ptr", "q_rope_ptr", "kv_ptr"), f"*{kind}"),
                    "out_ptr": "*fp32" if split else f"*{kind}", "lse_ptr": "*fp32", "scale_log2e": "fp32",
                    "indices_ptr": "*i32", "counts_ptr": "*i32",
                },
                {
                    "NUM_HEADS": heads, "TOPK": 2048, "TOPK_PADDED": 2048, "PAGE_SIZE": page_size, "LATENT": 512,
                    "ROPE": 64, "HAS_COUNTS": counted, "HAS_LSE": split, "IS_SPLIT": split,
                    "BLOCK_H": config.block_h, "BLOCK_N": config.block_n, "STAGES": config.num_stages,
                },
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )  # fmt: skip
            found.append({"config": list(config), "split": split, **made})
    for splits, warps in ((2, 1), (16, 1), (64, 4)):
        made = compile_one(
            kernel._merge_kernel,
            capability,
            {"partial_ptr": "*fp32", "partial_lse_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"},
            {"NUM_HEADS": 8, "LATENT": 512, "HAS_LSE": True, "BLOCK_S": splits, "BLOCK_D": 128},
            num_warps=warps,
        )
        found.append({"config": ["merge", splits], "split": True, **made})
    return found


def main() -> None:
    """Answer line by line."""
    if not COMPILES:
        mend_interpreter()
        # What torch.empty gives holds NaN: a partial result that is read before it is written shows.
        torch.use_deterministic_algorithms(True)
    answer_all(sparse_kernel.load, run, compile_all)


if __name__ == "__main__":
    main()
