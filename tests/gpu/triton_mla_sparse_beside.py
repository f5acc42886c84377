"""The sparse MLA kernel of the series beside the stock kernels of Hopper, in one run, as their backends call them.

    python tests/gpu/triton_mla_sparse_beside.py OUT.json [--commit COMMIT]

Needs a CUDA build of vLLM with FlashMLA and FlashAttention 3, on Hopper. FLASHMLA_SPARSE pads its query heads to 64;
FLASH_ATTN_MLA_SPARSE reads a cache of pages of one row. Every answer is held to float64; ends in 1 where one is wrong.
"""

# The lint environment has neither torch nor vLLM.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/patches")]
from sparse_kernel import LATENT, Batch

from tests.gpu import triton_mla_sparse as kernels
from tests.gpu.triton_mla_sparse import PATCHES, TOPK, Bench

HEADS = (8, 16, 64)
#: Heads that FlashMLA's kernel wants a multiple of.
PADDED = 64
Call = Callable[[], torch.Tensor]


def triton(bench: Bench, batch: Batch) -> Call:
    """Ours, into a buffer that is there."""
    out, _ = kernels.empty(batch)

    def call() -> torch.Tensor:
        bench.attend(batch, out)
        return out

    return call


def flashmla(_bench: Bench, batch: Batch) -> Call:
    """As FLASHMLA_SPARSE does: the padding is there before, as its workspace is."""
    assert isinstance(batch.q, torch.Tensor)
    heads = batch.q.shape[1]
    padded = torch.zeros(len(batch.q), -(-heads // PADDED) * PADDED, 576, dtype=batch.q.dtype, device="cuda")
    kv, indices = batch.kv.view(-1, 1, 576), batch.indices.view(len(batch.q), 1, -1)

    def call() -> torch.Tensor:
        q = batch.q
        if heads % PADDED:
            padded[:, :heads] = batch.q
            q = padded
        out, _, _ = flash_mla_sparse_fwd(q, kv, indices, batch.scale, topk_length=batch.counts)
        return torch.as_tensor(out)[:, :heads]

    return call


def flash_attention(_bench: Bench, batch: Batch) -> Call:
    """As FLASH_ATTN_MLA_SPARSE does."""
    latent, rope = (part.contiguous() for part in batch.parts)
    starts = torch.arange(len(latent) + 1, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        out = flash_attn_varlen_func(
            q=rope,
            k=batch.kv[:, LATENT:].unsqueeze(1).unsqueeze(1),
            v=batch.kv[:, :LATENT].unsqueeze(1).unsqueeze(1),
            q_v=latent,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=TOPK,
            seqused_k=batch.counts,
            block_table=batch.indices,
            softmax_scale=batch.scale,
            causal=True,
            fa_version=3,
        )
        return torch.as_tensor(out)

    return call


STOCK = {"triton": triton, "flashmla": flashmla, "flash_attention": flash_attention}


def beside(bench: Bench, name: str, batches: list[Batch], replays: int = 15) -> dict[str, Any]:
    """Microseconds of each kernel, and how many times as fast the fastest stock one ours is."""
    took: dict[str, Any] = {}
    for kernel, make in STOCK.items():
        try:
            calls = [make(bench, batch) for batch in batches]
            bench.check(f"{kernel}: {name}", batches[-1], calls[-1]())
            took[f"{kernel}_us"] = round(kernels.microseconds([partial(_drop, call) for call in calls], replays), 2)
        except Exception as error:
            bench.failures.append(f"{kernel}: {name}: {type(error).__name__}: {str(error)[:300]}")
    stock = [value for key, value in took.items() if key != "triton_us"]
    if stock and "triton_us" in took:
        took["speed_of_stock"] = round(min(stock) / took["triton_us"], 2)
    print(name, took, flush=True)
    return took


def _drop(call: Call) -> None:
    call()


def decode(bench: Bench) -> list[dict[str, Any]]:
    """One token a request, by context, number of requests and heads."""
    found = []
    for context, requests in kernels.DECODES:
        kv, indices, counts = kernels.decode_batch(context, requests)
        for heads in HEADS:
            q = torch.randn(requests, heads, 576, dtype=torch.bfloat16, device="cuda")
            name = f"decode of {requests} requests, {heads} heads, context {context}"
            times = beside(bench, name, [Batch(q, kv, layer, 576**-0.5, counts) for layer in indices])
            found.append({"context": context, "requests": requests, "heads": heads, **times})
        del kv
    return found


def prefill(bench: Bench) -> list[dict[str, Any]]:
    """A chunk of 4096 tokens at the end of one context, each with up to 2048 random slots before it."""
    found, tokens = [], 4096
    for context in (4096, 32768):
        batch = kernels.prefill_batch(tokens, context)
        for heads in (*HEADS, 128):
            q = torch.randn(tokens, heads, 576, dtype=torch.bfloat16, device="cuda")
            name = f"prefill of {tokens} tokens, {heads} heads, context {context}"
            times = beside(bench, name, [Batch(q, *batch)], replays=5)
            found.append({"context": context, "tokens": tokens, "heads": heads, **times})
    return found


def main() -> int:
    """Both parts, and what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", default="", help="what the tree is that this runs in")
    options = parser.parse_args()
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "vllm", "triton")},
        "commit": options.commit,
        "covers": [
            "tests/gpu/triton_mla_sparse.py",
            "tests/gpu/triton_mla_sparse_beside.py",
            *sorted(path.relative_to(ROOT).as_posix() for path in PATCHES),
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(kernels.load_kernel(Path(folder)), [])
        for part in (decode, prefill):
            record[part.__name__] = part(bench)
            record["failures"] = bench.failures
            options.output.write_text(kernels.to_text(record), encoding="utf-8")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
