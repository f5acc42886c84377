"""The indexer as vLLM runs it, from its metadata to the chosen keys, on the CPU. Runs in the stack's interpreter.

With TRITON_INTERPRET=1. The first argument is a list of machines that this stands for, by JSON: compute capability,
whether DeepGEMM is installed, nvcc's version, variables. Prints a line of JSON, for each machine the log's lines on
building the layer, what the metadata's builder decides, whose kernels ran, and whether the chosen keys are the
reference's. What the CPU build lacks, the CUDA operators around the logits, is stood in for by torch.
"""

# ruff: noqa: E402
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import indexer_kernel
import torch
from triton.backends import backends

MACHINE: dict[str, Any] = {}  # the present one
TOPK, DIM = 16, indexer_kernel.DIM
# vLLM takes Triton on a CPU build only with a backend for it, which the interpreter does without.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")  # the CPU build has none
sys.modules["deep_gemm"] = ModuleType("deep_gemm")
sys.modules["deep_gemm"].__spec__ = ModuleSpec("deep_gemm", None)

from vllm import platforms
from vllm.platforms import cuda
from vllm.platforms.interface import DeviceCapability

cuda.CudaPlatform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*MACHINE["capability"]))
cuda.CudaPlatform.dispatch_key = "CPU"
platforms._current_platform = cuda.CudaPlatform()

from vllm.model_executor.layers import sparse_attn_indexer as layer
from vllm.utils import deep_gemm
from vllm.v1.attention.backends.mla import indexer as metadata

LOG: list[str] = []
RAN: list[str] = []


def stand_in_for_deep_gemm() -> None:
    """DeepGEMM's functions, which note that they ran and answer nothing."""

    def note(name: str, shape: Any) -> Any:
        def call(*arguments: Any, **_options: Any) -> torch.Tensor:
            RAN.append(name)
            return torch.zeros(shape(*arguments))

        return call

    functions = {
        "fp8_fp4_mqa_logits": lambda q, kv, *_: (len(q[0]), len(kv[0])),
        "fp8_fp4_paged_mqa_logits": lambda q, kv, weights, lens, table, schedule, width: (len(weights), width),
        "get_paged_mqa_logits_metadata": lambda lens, block_size, num_sms: (num_sms + 1, 2),
    }
    for name, shape in functions.items():
        setattr(sys.modules["deep_gemm"], name, note(name, shape))


def build_layer(use_fp4_cache: bool = False) -> Any:
    """The layer as a model makes it."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pcp_shard_decode_requests=False
        ),
        kernel_config=SimpleNamespace(sparse_indexer_topk_backend="torch", enable_jit_warmup=False),
        compilation_config=SimpleNamespace(custom_ops=["all"], enabled_custom_ops=mock.MagicMock()),
    )
    with (
        mock.patch.object(layer, "get_current_vllm_config", lambda: config),
        mock.patch.object(layer.CustomOp, "__init__", torch.nn.Module.__init__),
    ):
        return layer.SparseAttnIndexer(
            None, DIM, "ue8m0", TOPK, DIM, 512, 4096, torch.empty(0), use_fp4_cache=use_fp4_cache
        )


def gather(cache: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, starts: Any) -> None:
    """cp_gather_indexer_k_quant_cache."""
    page_size = cache.shape[1]
    for request, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        for place in range(end - start):
            page = cache[table[request, place // page_size]].flatten()
            row = place % page_size
            k[start + place] = page[row * DIM : (row + 1) * DIM].view(indexer_kernel.E4M3)
            scale[start + place] = page[page_size * DIM + 4 * row : page_size * DIM + 4 * (row + 1)]


def top_k(logits: Any, starts: Any, ends: Any, indices: torch.Tensor, num_rows: int, *_: Any) -> None:
    """top_k_per_row_prefill: counted from a row's first key, -1 where there are not enough."""
    for row in range(num_rows):
        chosen = logits[row, starts[row] : ends[row]]
        chosen = chosen.topk(min(TOPK, len(chosen))).indices
        indices[row] = -1
        indices[row, : len(chosen)] = chosen.int()


def forward(batch: indexer_kernel.Batch, prefix: str, described: Any, cache: torch.Tensor) -> torch.Tensor:
    """What sparse_attn_indexer leaves in the buffer of the chosen keys."""
    rows = len(batch.starts)
    buffer = torch.full((rows + 2, TOPK), 7, dtype=torch.int32)
    context = SimpleNamespace(attn_metadata={prefix: described}, cudagraph_runtime_mode=layer.CUDAGraphMode.NONE)
    workspaces = SimpleNamespace(
        get_simultaneous=lambda *specs: [torch.zeros(shape, dtype=dtype) for shape, dtype in specs]
    )
    with contextlib.ExitStack() as stack:
        for name, new in (
            ("get_forward_context", lambda: context),
            ("current_workspace_manager", lambda: workspaces),
        ):
            stack.enter_context(mock.patch.object(layer, name, new))
        for name, function in (("cp_gather_indexer_k_quant_cache", gather), ("top_k_per_row_prefill", top_k)):
            stack.enter_context(mock.patch.object(layer.ops, name, function))
        returned = layer.sparse_attn_indexer(
            torch.empty(rows, 8), prefix, cache.squeeze(2), batch.q, None, None, batch.weights, DIM, "ue8m0", TOPK, DIM,
            512, 4096, buffer, True, False, False, "", topk_backend="torch",
        )  # fmt: skip
    assert returned is buffer
    return buffer


def chosen_are_right(batch: indexer_kernel.Batch, buffer: torch.Tensor) -> bool:
    """Whether every row has the keys that the reference puts first; random logits have no ties."""
    for row in range(len(batch.starts)):
        wanted, _ = indexer_kernel.reference(batch, row)
        first = set(wanted.topk(min(TOPK, len(wanted))).indices.tolist())
        found = [key for key in buffer[row].tolist() if key >= 0]
        if set(found) != first or len(found) != len(first):
            return False
    return bool((buffer[len(batch.starts) :] == 7).all())


def described(batch: indexer_kernel.Batch, **parts: Any) -> Any:
    """The layer's metadata of a batch."""
    fields: dict[str, Any] = {"num_decodes": 0, "num_decode_tokens": 0, "num_prefills": 0, "num_prefill_tokens": 0}
    slots = torch.zeros(len(batch.starts), dtype=torch.int64)
    return metadata.DeepseekV32IndexerMetadata(
        seq_lens=torch.empty(0), max_seq_len=512, slot_mapping=slots, **{**fields, **parts}
    )


def decode(next_n: int) -> bool:
    batch = indexer_kernel.make_decode([70, 33, 0, 130], next_n=next_n, page_gap=64, columns=512)
    cache, lens = batch.given["kv_cache"], batch.given["context_lens"]
    schedule = torch.zeros(9, 2, dtype=torch.int32)
    decode_metadata = metadata.DeepSeekV32IndexerDecodeMetadata(
        block_table=batch.given["block_table"], seq_lens=lens, decode_lens=torch.full((4,), next_n, dtype=torch.int32),
        requires_padding=False, schedule_metadata=schedule,
    )  # fmt: skip
    tokens = len(batch.starts)
    parts = described(batch, num_decodes=4, num_decode_tokens=tokens, decode=decode_metadata)
    return chosen_are_right(batch, forward(batch, "cache", parts, cache))


def prefill() -> bool:
    """Two requests, of which the second's rows come in two chunks that share its gathered keys."""
    lens, queries = [50, 90], [3, 8]
    pages = indexer_kernel.make_decode(lens, page_gap=32)
    batch = indexer_kernel.make_prefill(queries, lens)
    batch.keys, batch.scales = pages.keys, pages.scales
    cu_seq_lens = torch.tensor([0, 50, 140], dtype=torch.int32)
    chunks = [
        metadata.DeepseekV32IndexerPrefillChunkMetadata(
            block_table=pages.given["block_table"], cu_seqlen_ks=batch.given["starts"][first:last],
            cu_seqlen_ke=batch.given["ends"][first:last], cu_seq_lens=cu_seq_lens, token_to_seq=torch.empty(0),
            total_seq_lens=140, token_start=first, token_end=last, num_reqs=2, skip_kv_gather=first > 0,
            local_cu_seq_lens=cu_seq_lens, local_total_seq_lens=140, max_local_total_seq_lens=140,
        )
        for first, last in ((0, 5), (5, 11))
    ]  # fmt: skip
    parts = described(
        batch, num_prefills=2, num_prefill_tokens=11, prefill=metadata.DeepseekV32IndexerPrefillMetadata(chunks)
    )
    return chosen_are_right(batch, forward(batch, "cache", parts, pages.given["kv_cache"]))


def nvcc(folder: str) -> str:
    """A program that says the machine's version as nvcc does; none where the machine has none."""
    path = Path(folder) / "nvcc"
    if version := MACHINE.get("nvcc"):
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
        path.chmod(0o755)
    return str(path)


def answer(machine: dict[str, Any]) -> dict[str, Any]:
    """Build, ask the builder's questions, run."""
    MACHINE.clear()
    MACHINE.update(machine)
    LOG.clear()
    RAN.clear()
    deep_gemm.why_no_deep_gemm_mqa_logits.cache_clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(deep_gemm, "has_deep_gemm", lambda: machine.get("deep_gemm", False)),
        mock.patch.dict(os.environ, {"DG_JIT_NVCC_COMPILER": nvcc(folder), **machine.get("environment", {})}),
    ):
        build_layer()
        log = list(LOG)
        try:
            build_layer(use_fp4_cache=True)
            fp4_error = None
        except RuntimeError as error:
            fp4_error = str(error)
        builder = {
            "varlen": metadata._supports_varlen_paged_mqa_logits(),
            "flattened_device_lens": metadata._supports_flattened_device_query_lens(),
            "native": [rows for rows in range(1, 6) if metadata._supports_native_decode(rows)],
            "schedule": metadata.has_deep_gemm_mqa_logits(),
        }
        right = {"decode": decode(1), "speculative": decode(2), "prefill": prefill()}
    return {"log": log, "fp4_error": fp4_error, "builder": builder, "ran": sorted(set(RAN)), "right": right}


stand_in_for_deep_gemm()
deep_gemm.logger = SimpleNamespace(
    info_once=lambda text, *values: LOG.append(text % values), debug_once=lambda *_: None
)
print(json.dumps([answer(machine) for machine in json.loads(sys.argv[1])]))
