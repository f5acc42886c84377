"""Runs and compiles the indexer's kernel on a CPU. Runs in the stack's interpreter.

Answers each line of its input, a JSON object that names the kernel's file, by one line of JSON: batches (what
indexer_kernel.make_decode or make_prefill takes) by how far each answer is from the reference; with ``--compile``, a
compute capability by what every configuration that can be selected for it needs.
"""

# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

from types import ModuleType
from typing import Any

import indexer_kernel
import torch
from compile_ahead import compile_one
from kernel_lines import answer_all

TOPK = 16
POINTERS = {
    **dict.fromkeys(("q_ptr", "k_ptr"), "*u8"),
    **dict.fromkeys(("k_scale_ptr", "weights_ptr", "out_ptr"), "*fp32"),
    **dict.fromkeys(("starts_ptr", "ends_ptr", "table_ptr"), "*i32"),
}


def run(kernel: ModuleType, case: dict[str, Any]) -> dict[str, Any]:
    """Run batches one after the other through one buffer, filled with NaN before each."""
    options = case["run"]
    config = options["config"] and kernel.IndexerConfig(*options["config"])
    batches = [
        indexer_kernel.make_decode(**shape) if "contexts" in shape else indexer_kernel.make_prefill(**shape)
        for shape in case["batches"]
    ]
    # A row and some columns more than there are: what lies beside `out` must stay as it is.
    rows, columns = max(len(batch.starts) for batch in batches), max(batch.columns for batch in batches)
    buffer = torch.empty(rows + 1, columns + 5)
    found: dict[str, Any] = {"errors": [], "wrong_choices": 0, "beside_untouched": True}
    for batch in batches:
        buffer.fill_(float("nan"))
        out = buffer[: len(batch.starts), : batch.columns]
        indexer_kernel.run(kernel, batch, out, config=config, num_splits=options["num_splits"])
        found["errors"].append(indexer_kernel.error(batch, out))
        found["wrong_choices"] += indexer_kernel.top_k_differs(batch, out, TOPK, indexer_kernel.BOUND)
        out.fill_(float("nan"))
        found["beside_untouched"] &= bool(buffer.isnan().all())
    return found


def compile_all(kernel: ModuleType, capability: int) -> list[dict[str, Any]]:
    """Compile what can be selected there, for one and two rows of a request, GLM-5's heads and DeepSeek's."""
    found = []
    for prefill, config in enumerate(kernel.configs_of(capability)):
        for heads in (32, 64):
            most = config.columns // heads
            for block_m in {most} if prefill else {1, most}:
                made = compile_one(
                    kernel._indexer_logits_kernel,
                    capability,
                    POINTERS,
                    {
                        "NUM_HEADS": heads, "HEAD_DIM": 128, "PAGE_SIZE": 0 if prefill else 64,
                        "HAS_STARTS": bool(prefill), "END_PER_ROW": True, "HAS_E4M3": config.has_e4m3,
                        "BLOCK_M": block_m, "BLOCK_N": config.block_n, "STAGES": config.num_stages,
                        **({"table_ptr": None} if prefill else {"starts_ptr": None}),
                    },
                    num_warps=config.num_warps,
                    num_stages=config.num_stages,
                )  # fmt: skip
                found.append({"config": list(config), "heads": heads, "block_m": block_m, **made})
    return found


if __name__ == "__main__":
    answer_all(indexer_kernel.load, run, compile_all)
