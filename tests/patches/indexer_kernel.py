"""The indexer's logits without vLLM around them: what they have to be, and batches to try the kernel on.

Runs in an interpreter with torch and Triton, on the CPU (TRITON_INTERPRET=1) and on a GPU.
"""

# The lint environment has neither.
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import sparse_kernel
import torch

MODULE = "vllm/v1/attention/ops/triton_indexer_logits.py"
DIM = 128
E4M3 = torch.float8_e4m3fn
#: Largest distance of a logit from the reference, in parts of the sum of its products' sizes. Sums in float32 of
#: exact products lose less than the first; Hopper's tensor cores keep about 13 bits of e4m3 products.
BOUND, BOUND_E4M3 = 2**-18, 2**-11


@dataclass
class Batch:
    """Rows of queries [rows, H, 128], and for row m the keys starts[m] to ends[m] - 1 of its request.

    `keys` and `scales` are those of each request, in float64; `given` is what the kernel takes beside q and weights.
    """

    q: torch.Tensor
    weights: torch.Tensor
    keys: list[torch.Tensor]
    scales: list[torch.Tensor]
    request_of: list[int]
    first_columns: list[int]  # the first column of a request's keys
    starts: list[int]
    ends: list[int]
    columns: int
    next_n: int
    given: dict[str, torch.Tensor]

    @property
    def paged(self) -> bool:
        return "kv_cache" in self.given


def load(path: Path) -> ModuleType:
    """The kernel's module from its file."""
    return sparse_kernel.load(path)


def run(kernel: ModuleType, batch: Batch, out: torch.Tensor, **options: Any) -> None:
    """Ask the kernel for the batch's logits, into `out`."""
    if batch.paged:
        q = batch.q.unflatten(0, (-1, batch.next_n))
        kernel.paged_indexer_logits(q, weights=batch.weights, out=out, **batch.given, **options)
    else:
        kernel.indexer_logits(batch.q, weights=batch.weights, out=out, **batch.given, **options)


def _quantized(count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in e4m3 and their scales, powers of two that differ widely, as indexer_k_quant_and_cache makes them."""
    sizes = torch.randint(-4, 5, (count, 1), generator=random)
    keys = torch.randn(count, DIM, generator=random) * torch.exp2(sizes)
    scales = torch.exp2(torch.ceil(torch.log2(keys.abs().amax(-1) / 448)))
    return (keys / scales[:, None]).to(E4M3), scales


def _queries(rows: int, heads: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    q = (torch.randn(rows, heads, DIM, generator=random) * 100).clamp(-448, 448).to(E4M3)
    return q, torch.randn(rows, heads, generator=random)


def make_decode(
    contexts: list[int],
    *,
    next_n: int = 1,
    heads: int = 32,
    page_size: int = 64,
    page_gap: int = 0,
    columns: int = 0,
    room: int = 0,
    per_row: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Requests whose last `next_n` tokens are the query; `contexts` are those of the last one, 0 for padding.

    Pages lie in random order, `page_gap` bytes apart; what no context names holds NaN. Behind its context a block table
    names a page of ones: logits of these are finite, so that one that is written for them shows. Contexts are given
    for each row or for each request. With `room`, cache and block table are as large as for contexts of so many tokens.
    """
    random = torch.Generator().manual_seed(seed)
    batch = len(contexts)
    pages = [-(-context // page_size) for context in contexts]
    width = -(-max(1, room, *contexts) // page_size) + 1
    free = torch.randperm(batch * width if room else sum(pages) + 2, generator=random).tolist()
    cache = torch.full((len(free), page_size * (DIM + 4) + page_gap), 0x7F, dtype=torch.uint8)
    cache[:, page_size * DIM :].view(torch.float32).fill_(float("nan"))
    beyond = free.pop()
    cache[beyond, : page_size * DIM] = torch.ones(1).to(E4M3).view(torch.uint8)
    cache[beyond, page_size * DIM : page_size * (DIM + 4)].view(torch.float32).fill_(1.0)
    table = torch.full((batch, width), beyond, dtype=torch.int32)
    keys, scales = [], []
    for request, context in enumerate(contexts):
        values, factors = _quantized(context, random)
        keys.append(values)
        scales.append(factors)
        for place in range(pages[request]):
            page = free.pop()
            table[request, place] = page
            tokens = slice(place * page_size, (place + 1) * page_size)
            rows = values[tokens].view(torch.uint8)
            cache[page, : rows.numel()] = rows.flatten()
            bytes_ = factors[tokens].view(torch.uint8)
            cache[page, page_size * DIM : page_size * DIM + bytes_.numel()] = bytes_
    q, weights = _queries(batch * next_n, heads, random)
    ends = [max(0, context - next_n + place + 1) for context in contexts for place in range(next_n)]
    lens = torch.tensor(ends).view(batch, next_n) if per_row else torch.tensor(contexts).view(batch, 1)
    cache = cache.to(device)
    strides = (cache.stride(0), DIM + 4, DIM + 4, 1)
    given = {
        "kv_cache": cache.as_strided((len(cache), page_size, 1, DIM + 4), strides),
        "context_lens": lens.int().to(device),
        "block_table": table.to(device),
    }
    return Batch(
        q.to(device), weights.to(device), keys, scales,
        [request for request in range(batch) for _ in range(next_n)], [0] * batch, [0] * len(ends), ends,
        columns or max(1, *contexts), next_n, given,
    )  # fmt: skip


def make_prefill(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    heads: int = 32,
    rows: tuple[int, int] | None = None,
    beyond: int = 0,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Requests whose last tokens are the query and whose keys are gathered one behind the other; of the rows some, as
    chunks and ranks take them. Ends of the last key are given as `beyond` more."""
    random = torch.Generator().manual_seed(seed)
    keys, scales = zip(*(_quantized(length, random) for length in seq_lens), strict=True)
    first_columns = [0, *itertools.accumulate(seq_lens)][:-1]
    request_of, starts, ends = [], [], []
    for request, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        request_of += [request] * query
        starts += [first_columns[request]] * query
        ends += [first_columns[request] + length - query + place + 1 for place in range(query)]
    some = slice(*(rows or (0, len(starts))))
    q, weights = _queries(len(starts), heads, random)
    given = {
        "k": torch.cat(keys).to(device),
        "k_scale": torch.cat(scales).to(device),
        "starts": torch.tensor(starts, dtype=torch.int32, device=device)[some],
        "ends": torch.tensor(
            [end + beyond if end == sum(seq_lens) else end for end in ends], dtype=torch.int32, device=device
        )[some],
    }
    return Batch(
        q.to(device)[some], weights.to(device)[some], list(keys), list(scales),
        request_of[some], first_columns, starts[some], ends[some], sum(seq_lens), 1, given,
    )  # fmt: skip


def reference(batch: Batch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one row's keys in float64, and the sums of their products' sizes, which bound what rounding does."""
    request, first = batch.request_of[row], batch.first_columns[batch.request_of[row]]
    some = slice(batch.starts[row] - first, batch.ends[row] - first)
    keys = batch.keys[request][some].to(batch.q.device).double()
    scales = batch.scales[request][some].to(batch.q.device).double()
    q, weights = batch.q[row].double(), batch.weights[row].double()
    logits = ((keys @ q.T).relu() @ weights) * scales
    return logits, ((keys.abs() @ q.abs().T) @ weights.abs()) * scales


def error(batch: Batch, out: torch.Tensor, rows: list[int] | None = None, beside: bool = True) -> float:
    """Largest distance from the reference, in parts of the products' sizes; infinite where a logit is not finite or,
    with `beside`, where something was written beside a row's keys. `out` held NaN before."""
    worst = 0.0
    for row in range(len(batch.starts)) if rows is None else rows:
        start, end = batch.starts[row], batch.ends[row]
        found = out[row, start:end]
        untouched = out[row, :start].isnan().all() & out[row, end:].isnan().all()
        if not bool(found.isfinite().all()) or (beside and not bool(untouched)):
            return float("inf")
        if end > start:
            wanted, size = reference(batch, row)
            worst = max(worst, float(((found - wanted).abs() / size).max()))
    return worst


def top_k_differs(batch: Batch, out: torch.Tensor, topk: int, bound: float, rows: list[int] | None = None) -> int:
    """How many keys are among the first `topk` of a row in one of answer and reference, though their logit is farther
    from the last of these than `bound` explains."""
    wrong = 0
    for row in range(len(batch.starts)) if rows is None else rows:
        wanted, size = reference(batch, row)
        if len(wanted) <= topk:
            continue
        found = out[row, batch.starts[row] : batch.ends[row]]
        last = wanted.topk(topk).values[-1]
        chosen = torch.zeros_like(wanted, dtype=torch.bool)
        chosen[found.topk(topk).indices] = True
        decided = (wanted - last).abs() > 2 * bound * size.max()
        wrong += int((decided & (chosen != (wanted >= last))).sum())
    return wrong
