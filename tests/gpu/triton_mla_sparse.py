"""The sparse MLA kernel of the series on a GPU: right, graph-safe and how fast, without vLLM around it.

    python tests/gpu/triton_mla_sparse.py OUT.json [--part numbers|graphs|compiled|decode|prefill]… [--commit COMMIT]

Needs torch with CUDA, Triton and PyYAML. Ends in 1 where an answer is wrong. Speed is that of CUDA graphs; each call
in a graph reads a KV cache of its own, as layers do, 300 MB and more in all, so that L2 holds nothing of the last call.
"""

# The lint environment has neither torch nor Triton.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "tests/patches")]

import sparse_kernel
from octoserve import unified_diff
from sparse_kernel import LATENT, Batch

SERIES = ROOT / "files/patches/vllm-0.32.0"
PATCHES = [path for path in sorted(SERIES.glob("*.patch")) if f"+++ b/{sparse_kernel.MODULE}\n" in path.read_text()]
TOPK = 2048
ROW = 576 * 2  # bytes
#: Bytes per second of the memory, and of dense bf16 products per second: vendors' datasheets.
CARDS = {"NVIDIA H200": (4.8e12, 989e12)}
#: Contexts and requests of a decode step.
DECODES = tuple(itertools.product((2048, 32768, 131072), (1, 8, 32, 128)))
PARTS = ("numbers", "graphs", "compiled", "decode", "prefill")


@dataclass
class Bench:
    kernel: ModuleType
    failures: list[str]

    def attend(self, batch: Batch, out: torch.Tensor, lse: torch.Tensor | None = None, **options: Any) -> None:
        self.kernel.sparse_mla_attention(
            batch.q, batch.kv, batch.indices, batch.scale, out, lse, batch.counts, **options
        )

    def check(self, name: str, batch: Batch, out: torch.Tensor, lse: torch.Tensor | None = None) -> float:
        """Distance from the reference of 128 tokens at most, the last among them."""
        tokens = sorted({*range(0, len(out), max(1, len(out) // 128)), len(out) - 1})
        wanted, wanted_lse = sparse_kernel.reference(batch, tokens)
        error = sparse_kernel.error(out[tokens], wanted)
        if not bool(out.isfinite().all()) or error > sparse_kernel.BOUNDS[out.dtype]:
            self.failures.append(f"{name}: off by {error:.2g}")
        if lse is not None:
            same = (lse[tokens] == wanted_lse) | ((lse[tokens] - wanted_lse).abs() <= 1e-4)
            if not bool(same.all()):
                self.failures.append(f"{name}: wrong lse")
        return error


def load_kernel(folder: Path) -> ModuleType:
    """The module as the series' patches leave it."""
    text: str | None = None
    for patch in PATCHES:
        for diff in unified_diff.parse(patch.read_text(encoding="utf-8"), patch.name)[1]:
            if diff.path == sparse_kernel.MODULE:
                text = unified_diff.apply(diff, text, patch.name)
    assert text is not None, f"found no patch of {sparse_kernel.MODULE} in {SERIES}"
    path = folder / Path(sparse_kernel.MODULE).name
    path.write_text(text, encoding="utf-8")
    return sparse_kernel.load(path)


def empty(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for an answer, filled with NaN."""
    latent, _ = batch.parts
    out = torch.full(latent.shape, float("nan"), dtype=latent.dtype, device=latent.device)
    return out, torch.full(latent.shape[:2], float("nan"), device=latent.device)


def batches() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and shapes."""
    for heads in (8, 16, 20, 32, 64, 128):
        for tokens in (1, 2, 7, 33, 128, 300):
            yield f"{tokens} tokens, {heads} heads", {"tokens": tokens, "heads": heads, "topk": TOPK, "rows": 8192}
    few = {"tokens": 9, "heads": 8, "topk": TOPK, "rows": 4096, "valid": [0, 1, 63, 64, 65, 500, 2047, 2048, 0]}
    yield "few valid, scattered", {**few, "scattered": True}
    yield "few valid, counted", {**few, "counted": True}
    yield "few valid, fp16", {**few, "dtype": torch.float16}
    yield "none valid", {"tokens": 5, "heads": 16, "topk": TOPK, "rows": 64, "valid": [0] * 5}
    yield "without rope", {**few, "rope": 0}
    yield "q in two tensors", {**few, "split_q": True, "heads": 64}
    for page in (16, 32, 64):
        yield f"pages of {page}", {**few, "page_size": page, "page_gap": 3, "row_gap": 64, "scattered": True}
    yield "odd topk", {"tokens": 3, "heads": 12, "topk": 1999, "rows": 4096, "scattered": True}
    yield "top 128", {"tokens": 40, "heads": 16, "topk": 128, "rows": 4096}
    for heads in (8, 64):
        yield f"4096 tokens, {heads} heads", {"tokens": 4096, "heads": heads, "topk": TOPK, "rows": 32768}


def numbers(bench: Bench) -> dict[str, Any]:
    """Answers of the chosen configurations, of all others that fit the card, and beyond 2**31 elements."""
    errors = {}
    for seed, (name, shape) in enumerate(batches()):
        batch = sparse_kernel.make(**shape, device="cuda", seed=seed)
        out, lse = empty(batch)
        bench.attend(batch, out, lse)
        errors[name] = bench.check(name, batch, out, lse)
        again, _ = empty(batch)
        bench.attend(batch, again)
        if not torch.equal(out, again):
            bench.failures.append(f"{name}: another answer the second time")
    here, _ = bench.kernel._device_of(0)
    for capability in (here, 120, *((80, 90) if here == 90 else ())):
        for config in bench.kernel.configs_of(capability):
            for splits in (1, 7):
                name = f"{tuple(config)} of SM{capability}, {splits} splits"
                batch = sparse_kernel.make(17, 64, TOPK, 8192, valid=[2048, 0, 100] + [2048] * 14, device="cuda")
                out, lse = empty(batch)
                bench.attend(batch, out, lse, config=config, num_splits=splits)
                errors[name] = bench.check(name, batch, out, lse)

    name, rows = "beyond 2**31 elements", 5_000_000
    batch = sparse_kernel.make(4, 8, TOPK, 8192, device="cuda")
    kv = torch.full((rows, 576), float("nan"), dtype=batch.kv.dtype, device="cuda")
    kv[-len(batch.kv) :] = batch.kv
    batch = Batch(batch.q, kv, batch.indices + (rows - len(batch.kv)), batch.scale)
    out, lse = empty(batch)
    bench.attend(batch, out, lse)
    errors[name] = bench.check(name, batch, out, lse)
    return {"worst": max(errors.values()), "cases": len(errors), "errors": errors}


def graphs(bench: Bench) -> dict[str, Any]:
    """One capture for each shape, replayed on other inputs; short batches padded with tokens without slots."""
    errors = {}
    for heads in (8, 64):
        for tokens in (1, 3, 8, 32, 128):
            shape: dict[str, Any] = {"tokens": tokens, "heads": heads, "topk": TOPK, "rows": 8192, "counted": True}
            batch = sparse_kernel.make(**shape, device="cuda")
            out, lse = empty(batch)
            bench.attend(batch, out, lse)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                bench.attend(batch, out, lse)
            for seed in (1, 2, 3):
                valid = [TOPK if token < tokens - seed + 1 else 0 for token in range(tokens)]
                other = sparse_kernel.make(**shape, valid=valid, seed=seed, device="cuda")
                for part in ("q", "kv", "indices", "counts"):
                    getattr(batch, part).copy_(getattr(other, part))
                out.fill_(float("nan"))
                lse.fill_(float("nan"))
                graph.replay()
                name = f"graph of {tokens} tokens, {heads} heads, replay {seed}"
                errors[name] = bench.check(name, batch, out, lse)
    return {"worst": max(errors.values()), "cases": len(errors)}


def compiled(bench: Bench) -> dict[str, Any]:
    """As a custom operator that says what it changes, in a function that torch.compile rewrites, with and without
    CUDA graphs: two layers one after the other through one buffer."""

    @torch.library.custom_op("octoserve::sparse_mla", mutates_args=("out",))  # type: ignore[untyped-decorator]
    def operator(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        bench.kernel.sparse_mla_attention(q, kv, indices, scale, out)

    def layers(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
        out = torch.full_like(q[..., :LATENT], float("nan"))
        operator(q, kv, indices, scale, out)
        first = out.clone()
        second = torch.cat([first * 3 + q[..., :LATENT], q[..., LATENT:]], dim=-1)
        out.fill_(float("nan"))
        operator(second, kv, indices, scale, out)
        return first + out

    worst = 0.0
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        function = torch.compile(layers, fullgraph=True, mode=mode)
        for seed in range(4):
            batch = sparse_kernel.make(6, 8, TOPK, 8192, valid=[2048, 0, 3, 2048, 64, 2048], seed=seed, device="cuda")
            arguments = (batch.q, batch.kv, batch.indices, batch.scale)
            wanted = layers(*arguments)
            error = sparse_kernel.error(function(*arguments).clone(), wanted.double())
            worst = max(worst, error)
            if error > 2 * sparse_kernel.BOUNDS[torch.bfloat16]:
                bench.failures.append(f"torch.compile, {mode}, batch {seed}: off by {error:.2g} from eager")
    return {"worst": worst}


def microseconds(calls: list[Callable[[], None]], replays: int = 15) -> float:
    """Of one call, median over replays of a CUDA graph of all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls) * 1000)
    return float(sorted(times)[len(times) // 2])


@triton.jit  # type: ignore[untyped-decorator]
def gather_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    kv_ptr,
    indices_ptr,
    out_ptr,
    splits,
    TOPK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
):
    """Reads the rows as the kernel does and adds them up: how fast they can come."""
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64)
    latent, rope = tl.arange(0, 512), tl.arange(0, 64)
    sums = tl.zeros([BLOCK, 512], dtype=tl.float32)
    rope_sums = tl.zeros([BLOCK, 64], dtype=tl.float32)
    positions = split * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(indices_ptr + token * TOPK + positions)
    for _ in tl.range(0, TOPK // BLOCK // splits, num_stages=STAGES):
        rows = kv_ptr + slots.to(tl.int64)[:, None] * 576
        positions += splits * BLOCK
        slots = tl.load(indices_ptr + token * TOPK + positions, mask=positions < TOPK, other=0)
        sums += tl.load(rows + latent[None, :]).to(tl.float32)
        rope_sums += tl.load(rows + 512 + rope[None, :]).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0) * 576 + latent, tl.sum(sums, 0))
    tl.store(out_ptr + tl.program_id(0) * 576 + 512 + rope, tl.sum(rope_sums, 0))


def gathers(kv: torch.Tensor, indices: torch.Tensor, splits: int) -> list[Callable[[], None]]:
    """Read the rows of every layer's indices [layers, requests, TOPK] in this many splits."""
    out = torch.empty(indices.shape[1] * splits * 576, device="cuda")
    grid = (indices.shape[1] * splits,)

    def call(layer: torch.Tensor) -> None:
        gather_kernel[grid](kv, layer, out, splits, TOPK, 32, 3, num_warps=4)

    return [partial(call, layer) for layer in indices]


def decode_batch(context: int, requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token a request: the cache of all layers [rows, 576], 2048 random slots of each request's own context by
    layer [layers, requests, 2048], and their counts [requests]. So many layers that L2 is cold for each."""
    layers = min(128, max(2, round(300e6 / (requests * TOPK * ROW))))
    kv = torch.empty(layers * requests * context, 576, dtype=torch.bfloat16, device="cuda").normal_()
    starts = torch.arange(layers * requests, device="cuda", dtype=torch.int32)[:, None] * context
    order = [torch.randperm(context, device="cuda", dtype=torch.int32)[:TOPK] for _ in range(len(starts))]
    indices = (torch.stack(order) + starts).view(layers, requests, TOPK)
    return kv, indices, torch.full((requests,), TOPK, dtype=torch.int32, device="cuda")


def decode(bench: Bench) -> list[dict[str, Any]]:
    """One token a request, by context and number of requests."""
    found = []
    capability, multiprocessors = bench.kernel._device_of(0)
    for context, requests in DECODES:
        kv, indices, counts = decode_batch(context, requests)
        few = [splits for splits in (2, 4, 8, 32) if requests * splits <= 512]
        gather = min(microseconds(gathers(kv, indices, splits), replays=5) for splits in few)
        for heads in (8, 16, 64):
            q = torch.randn(requests, heads, 576, dtype=torch.bfloat16, device="cuda")
            calls = [Batch(q, kv, layer, 576**-0.5, counts) for layer in indices]
            out, _ = empty(calls[0])
            took = microseconds([partial(bench.attend, batch, out) for batch in calls])
            bench.attend(calls[-1], out)
            name = f"decode of {requests} requests, {heads} heads, context {context}"
            bench.check(name, calls[-1], out)
            moved = requests * TOPK * (ROW + 4) + q.nbytes + out.nbytes
            config = bench.kernel.select_config(capability, multiprocessors, requests, heads)
            splits = bench.kernel.select_num_splits(config, multiprocessors, requests, heads, TOPK)
            one = {
                "context": context, "requests": requests, "heads": heads, "us": round(took, 2),
                "gather_us": round(gather, 2), "config": list(config), "splits": splits,
                **share(moved, 2 * requests * heads * TOPK * (576 + LATENT), took),
            }  # fmt: skip
            found.append(one)
            print(name, one, flush=True)
        del kv, calls
    return found


def prefill_batch(tokens: int, context: int) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """Cache, indices, scale and counts of a chunk that ends a context, up to 2048 random slots before each token."""
    kv = torch.randn(context, 576, dtype=torch.bfloat16, device="cuda")
    ends = torch.arange(context - tokens + 1, context + 1, device="cuda")
    keys = torch.rand(tokens, context, device="cuda")
    keys[torch.arange(context, device="cuda")[None, :] >= ends[:, None]] = 2.0
    values, order = keys.topk(TOPK, dim=1, largest=False)
    indices = order.int().masked_fill(values > 1.0, -1)
    return kv, indices, 576**-0.5, (indices >= 0).sum(1).int()


def prefill(bench: Bench) -> list[dict[str, Any]]:
    """A chunk of 4096 tokens at the end of one context, each with up to 2048 random slots before it."""
    found = []
    tokens = 4096
    for context in (4096, 32768):
        kv, indices, scale, counts = prefill_batch(tokens, context)
        for heads in (8, 16, 64, 128):
            q = torch.randn(tokens, heads, 576, dtype=torch.bfloat16, device="cuda")
            batch = Batch(q, kv, indices, scale, counts)
            out, _ = empty(batch)
            took = microseconds([partial(bench.attend, batch, out)], replays=5)
            name = f"prefill of {tokens} tokens, {heads} heads, context {context}"
            bench.check(name, batch, out)
            flops = 2 * heads * int(counts.sum()) * (576 + LATENT)
            moved = kv.nbytes + indices.nbytes + q.nbytes + out.nbytes
            found.append({
                "context": context, "tokens": tokens, "heads": heads, "us": round(took, 1),
                "tflops": round(flops / took / 1e6, 1),
                "rows_from_l2_tb_s": round(int(counts.sum()) * ROW / took / 1e6, 2),
                **share(moved, flops, took),
            })  # fmt: skip
            print(name, found[-1], flush=True)
    return found


def share(moved: int, flops: int, took: float) -> dict[str, Any]:
    """The floor: what bytes and products take at the datasheet's rates, whichever is more."""
    rates = CARDS.get(torch.cuda.get_device_name())
    if rates is None:
        return {}
    floors = {"memory": moved / rates[0] * 1e6, "products": flops / rates[1] * 1e6}
    bound = max(floors, key=lambda kind: floors[kind])
    return {"floor_us": round(floors[bound], 2), "bound": bound, "share_of_floor": round(floors[bound] / took, 3)}


def to_text(record: dict[str, Any]) -> str:
    """JSON with a line for each measurement."""
    lines = []
    for key, value in record.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(key)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Run the parts that were asked for, all if none, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--commit", default="", help="what the tree is that this runs in")
    options = parser.parse_args()
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": options.commit,
        "covers": ["tests/gpu/triton_mla_sparse.py", *sorted(path.relative_to(ROOT).as_posix() for path in PATCHES)],
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(load_kernel(Path(folder)), [])
        for part in options.part or PARTS:
            try:
                record[part] = globals()[part](bench)
            except Exception as error:
                bench.failures.append(f"{part}: {type(error).__name__}: {error}")
            record["failures"] = bench.failures
            options.output.write_text(to_text(record), encoding="utf-8")
            print(part, "failures so far:", bench.failures, flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
