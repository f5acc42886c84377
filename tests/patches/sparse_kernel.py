"""The sparse MLA kernel without vLLM around it, what it has to compute, and batches to try it on.

Runs in an interpreter with torch and Triton, on the CPU (TRITON_INTERPRET=1) and on a GPU.
"""

# The lint environment has neither.
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

MODULE = "vllm/v1/attention/ops/triton_mla_sparse.py"
LATENT = 512
#: Largest distance of an answer from the reference, relative, in the 2-norm of one head. The weights of a softmax
#: and the answer are each rounded once: half a unit in the last place, 2**-9 and 2**-12 of the value.
BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclass
class Batch:
    """What the kernel takes. Slots may be absent (-1) anywhere; a slot that is in no list holds NaN."""

    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    kv: torch.Tensor
    indices: torch.Tensor
    scale: float
    counts: torch.Tensor | None = None

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q's latent and rope parts."""
        return self.q if isinstance(self.q, tuple) else (self.q[..., :LATENT], self.q[..., LATENT:])


def load(path: Path) -> ModuleType:
    """The kernel's module from its file. Stands in for the one thing that it imports from vLLM."""
    names = {"vllm": ModuleType("vllm"), "vllm.triton_utils": ModuleType("vllm.triton_utils")}
    names["vllm.triton_utils"].__dict__.update(tl=tl, triton=triton)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return module


def make(
    tokens: int,
    heads: int,
    topk: int,
    rows: int,
    *,
    valid: list[int] | None = None,
    scattered: bool = False,
    counted: bool = False,
    page_size: int = 0,
    page_gap: int = 0,
    row_gap: int = 0,
    rope: int = 64,
    split_q: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """A random batch. Lists hold `valid` slots each, at their front or scattered; `counted` puts slots that must not
    be read behind them. Pages of the cache are `page_gap` rows apart, its rows `row_gap` elements."""
    random = torch.Generator().manual_seed(seed)
    valid = [topk] * tokens if valid is None else valid
    indices = torch.full((tokens, topk), -1, dtype=torch.int32)
    for token, count in enumerate(valid):
        places = torch.randperm(topk, generator=random)[:count] if scattered else torch.arange(count)
        indices[token, places] = torch.randint(rows, (count,), generator=random, dtype=torch.int32)
    used = indices[indices >= 0].unique().long()

    width = LATENT + rope
    values = torch.full((rows, width), float("nan"), dtype=dtype)
    values[used] = torch.randn(len(used), width, generator=random).to(dtype)
    if page_size:
        assert rows % page_size == 0
        buffer = torch.full((rows // page_size, page_size + page_gap, width + row_gap), float("nan"), dtype=dtype)
        buffer[:, :page_size, :width] = values.view(-1, page_size, width)
        kv = buffer.to(device)[:, :page_size, :width]
    else:
        kv = torch.nn.functional.pad(values, (0, row_gap), value=float("nan")).to(device)[:, :width]

    q: Any = torch.randn(tokens, heads, width, generator=random).to(dtype).to(device)
    if split_q:  # as vLLM gives it: the latent part token-major, the rope part a view of the projection
        q = (q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1), q[..., LATENT:])
    counts = None
    if counted:
        assert not scattered
        counts = torch.tensor(valid, dtype=torch.int32, device=device)
        behind = torch.arange(topk) >= torch.tensor(valid)[:, None]
        indices[behind] = int(used[0]) if len(used) else 0
    return Batch(q, kv, indices.to(device), width**-0.5, counts)


def reference(batch: Batch, tokens: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer [T, H, 512] and log of the sum of exponentials [T, H], in float64, of some or all tokens."""
    latent, rope = (part.double() for part in batch.parts)
    kv = batch.kv if batch.kv.dim() == 2 else batch.kv.reshape(-1, batch.kv.shape[-1])
    tokens = list(range(len(latent))) if tokens is None else tokens
    out = torch.zeros(len(tokens), *latent.shape[1:], dtype=torch.float64, device=latent.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64, device=latent.device)
    for place, token in enumerate(tokens):
        slots = batch.indices[token]
        if batch.counts is not None:
            slots = slots[: int(batch.counts[token])]
        keys = kv[slots[slots >= 0].long()].double()
        if len(keys):
            scores = torch.cat([latent[token], rope[token]], dim=-1) @ keys.T * batch.scale
            lse[place] = scores.logsumexp(-1)
            out[place] = scores.softmax(-1) @ keys[:, :LATENT]
    return out, lse


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest relative distance of a token's head; infinite where an answer is not finite or an empty one not zero."""
    if not bool(out.isfinite().all()):
        return float("inf")
    distance = (out.double() - wanted).norm(dim=-1)
    size = wanted.norm(dim=-1)
    return float(
        torch.where(size > 0, distance / size, distance * float("inf")).nan_to_num(0.0, posinf=torch.inf).max()
    )
