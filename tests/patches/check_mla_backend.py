"""The backend TRITON_MLA_SPARSE from a model's logical indices to its answer, on the CPU.

Runs in the stack's interpreter, with TRITON_INTERPRET=1. Prints one line of JSON: the largest distance from the
reference of each batch.
"""

# ruff: noqa: E402
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import sparse_kernel
import torch
from sparse_kernel import LATENT, Batch
from triton.backends import backends

# vLLM takes Triton on a CPU build only with a backend for it, which the interpreter does without.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))

from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseImpl

TOPK = 128


def attend(block_size: int, blocks_between: int, query_lens: list[int], seq_lens: list[int], seed: int) -> float:
    """A batch of requests whose last tokens are the query, as forward_mqa gets it, with two rows of padding."""
    random = torch.Generator().manual_seed(seed)
    blocks = sum(-(-length // block_size) for length in seq_lens) + 2
    step = 1 + blocks_between  # pages of other layers between those of this one
    buffer = torch.full((blocks * step, block_size, 576), float("nan"), dtype=torch.float16)
    cache = buffer[::step]
    table = torch.zeros(len(seq_lens), 16, dtype=torch.int32)
    free = torch.randperm(blocks, generator=random).tolist()
    contexts = []
    for request, length in enumerate(seq_lens):
        context = torch.randn(length, 576, generator=random).half()
        contexts.append(context)
        for place in range(-(-length // block_size)):
            table[request, place] = free.pop()
            rows = context[place * block_size : (place + 1) * block_size]
            cache[int(table[request, place]), : len(rows)] = rows

    request_of = [request for request, length in enumerate(query_lens) for _ in range(length)]
    positions = [seq_lens[r] - query_lens[r] + i for r in range(len(seq_lens)) for i in range(query_lens[r])]
    tokens = len(request_of) + 2
    indices = torch.full((tokens + 5, TOPK), -1, dtype=torch.int32)
    for token, position in enumerate(positions):
        chosen = torch.randperm(position + 1, generator=random)[:TOPK]
        places = torch.randperm(TOPK, generator=random)[: len(chosen)] if token % 2 else torch.arange(len(chosen))
        indices[token, places] = chosen.int()
    q = torch.randn(tokens, 8, 576, generator=random).half()

    impl: Any = object.__new__(TritonMLASparseImpl)
    impl.__dict__.update(scale=576**-0.5, kv_lora_rank=LATENT, index_group=None)
    impl.topk_indices_buffer = indices
    metadata = SimpleNamespace(
        req_id_per_token=torch.tensor([*request_of, 0, 0, 0], dtype=torch.int32),
        block_table=table,
        block_size=block_size,
        num_decode_tokens=tokens,
    )
    out, _ = impl.forward_mqa((q[..., :LATENT], q[..., LATENT:]), cache, metadata, None)

    errors = []
    for token in range(tokens):
        context = contexts[request_of[token] if token < len(request_of) else 0]
        alone = Batch(q[token : token + 1], context, indices[token : token + 1], 576**-0.5)
        errors.append(sparse_kernel.error(out[token : token + 1], sparse_kernel.reference(alone)[0]))
    return max(errors)


torch.use_deterministic_algorithms(True)
print(
    json.dumps(
        {
            "decode": attend(64, 0, [1, 1, 1], [1, 200, 77], 0),
            "speculative": attend(32, 2, [3, 3], [150, 40], 1),
            "prefill": attend(16, 1, [9, 1, 4], [9, 130, 160], 2),
        }
    )
)
