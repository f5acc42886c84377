"""The indexer's kernel of the series on a GPU: right, graph-safe and how fast, without vLLM around it.

    python tests/gpu/triton_indexer.py OUT.json [--part numbers|graphs|decode|prefill|configs]… [--commit COMMIT]

Needs torch with CUDA, Triton and PyYAML. Ends in 1 where an answer is wrong. Speed is that of CUDA graphs; each call
in a graph reads keys of its own, as layers do, more than L2 holds where that takes no more than 512 calls. Where vLLM
is installed and its DeepGEMM runs, that is held to the same bound and timed beside. With --cpu, a dry run of all of it
in Triton's interpreter on tiny shapes, whose times say nothing.
"""

# The lint environment has neither torch nor Triton.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

CPU = "--cpu" in sys.argv
if CPU:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "module_utils"), str(ROOT / "tests/patches")]

import indexer_kernel
from indexer_kernel import BOUND, BOUND_E4M3, DIM, E4M3, Batch
from octoserve import unified_diff

from tests.gpu.triton_mla_sparse import microseconds, to_text

SERIES = ROOT / "files/patches/vllm-0.32.0"
PATCHES = [path for path in sorted(SERIES.glob("*.patch")) if f"+++ b/{indexer_kernel.MODULE}\n" in path.read_text()]
PAGE, ROW = 64, DIM + 4  # tokens, bytes
TOPK = 2048
#: Bytes per second of the memory, and of dense e4m3 products per second: vendors' datasheets.
CARDS = {"NVIDIA H200": (4.8e12, 1979e12)}
PARTS = ("numbers", "graphs", "decode", "prefill", "configs")
DEVICE = "cpu" if CPU else "cuda"
COLD = 3e5 if CPU else 300e6  # bytes that a graph's calls read in all


@dataclass
class Sizes:
    """Shapes of the measurements."""

    contexts: tuple[int, ...] = (2048, 32768, 131072)
    requests: tuple[int, ...] = (1, 8, 32, 128)
    chunk: int = 4096
    prefixes: tuple[int, ...] = (4096, 32768)
    most_calls: int = 512


SIZES = Sizes((96,), (1, 3), 8, (8, 70), 2) if CPU else Sizes()


@dataclass
class Bench:
    kernel: ModuleType
    deep_gemm: ModuleType | None
    failures: list[str] = field(default_factory=list)

    @property
    def bound(self) -> float:
        return BOUND if CPU or not self.kernel.configs_of(self.kernel._device_of(0)[0])[0].has_e4m3 else BOUND_E4M3

    def check(self, name: str, batch: Batch, out: torch.Tensor, beside: bool = True) -> float:
        """Distance of 48 rows at most, the first and last among them, and that they choose the right keys."""
        count = len(batch.starts)
        rows = sorted({*range(0, count, max(1, count // 48)), count - 1})
        worst = indexer_kernel.error(batch, out, rows, beside)
        if not worst <= self.bound:
            self.failures.append(f"{name}: off by {worst:.2g}")
        elif wrong := indexer_kernel.top_k_differs(batch, out, min(TOPK, batch.columns // 2), self.bound, rows):
            self.failures.append(f"{name}: {wrong} wrong choices")
        return worst


class Pages:
    """The keys of requests, or their scales, as a paged cache holds them."""

    def __init__(self, cache: torch.Tensor, table: torch.Tensor, context: int, scales: bool) -> None:
        self.cache, self.table, self.context, self.scales = cache, table, context, scales

    def __getitem__(self, request: int) -> torch.Tensor:
        pages = self.cache[self.table[request].long()].flatten(1)
        if self.scales:
            return pages[:, PAGE * DIM :].contiguous().view(torch.float32).flatten()[: self.context]
        return pages[:, : PAGE * DIM].contiguous().view(E4M3).view(-1, DIM)[: self.context]


def load_kernel(folder: Path) -> ModuleType:
    """The module as the series' patches leave it."""
    text: str | None = None
    for patch in PATCHES:
        for diff in unified_diff.parse(patch.read_text(encoding="utf-8"), patch.name)[1]:
            if diff.path == indexer_kernel.MODULE:
                text = unified_diff.apply(diff, text, patch.name)
    assert text is not None, f"found no patch of {indexer_kernel.MODULE} in {SERIES}"
    path = folder / Path(indexer_kernel.MODULE).name
    path.write_text(text, encoding="utf-8")
    return indexer_kernel.load(path)


def load_deep_gemm() -> ModuleType | None:
    """vLLM's wrappers, where DeepGEMM answers a question. None without vLLM or on a GPU that it has no kernels for."""
    if CPU or importlib.util.find_spec("vllm") is None:
        return None
    deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
    try:
        deep_gemm.get_paged_mqa_logits_metadata(torch.ones(1, 1, dtype=torch.int32, device=DEVICE), PAGE, sms())
    except Exception as error:
        print(f"DeepGEMM does not run here: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    return deep_gemm


def sms() -> int:
    return 1 if CPU else int(torch.cuda.get_device_properties(0).multi_processor_count)


def took(calls: list[Callable[[], None]], replays: int = 15) -> float:
    """Microseconds of one call."""
    if not CPU:
        return microseconds(calls, replays)
    started = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - started) / len(calls) * 1e6


def empty(bench: Bench, batch: Batch, columns: int = 0) -> torch.Tensor:
    """The logits' tensor as vLLM makes it, filled with NaN."""
    out: torch.Tensor = bench.kernel.empty_logits(len(batch.starts), columns or batch.columns, torch.device(DEVICE))
    out.fill_(float("nan"))
    return out


def batches() -> Iterator[tuple[str, Batch]]:
    """Small ones, of every kind."""
    for heads, next_n in itertools.product((32, 64), (1, 3) if CPU else (1, 2, 3, 4)):
        contexts = [100, 0, 7, 64] if CPU else [5000, 0, 1, 63, 64, 65, 4096, 33, 2047]
        named: dict[str, Any] = {"heads": heads, "next_n": next_n, "device": DEVICE, "seed": heads + next_n}
        yield f"decode, {heads} heads, {next_n} rows", indexer_kernel.make_decode(contexts, columns=8192, **named)
        other: dict[str, Any] = {"page_gap": 64 * 132, "page_size": (16, 32, 64, 64)[next_n - 1], "per_row": False}
        yield f"pages apart, {heads} heads, {next_n} rows", indexer_kernel.make_decode(contexts, **named, **other)
    for heads in (64,) if CPU else (16, 32, 64, 128):
        lens = ([9, 1, 4], [60, 1, 40]) if CPU else ([700, 1, 65, 3], [3000, 1, 65, 5000])
        named = {"heads": heads, "device": DEVICE, "seed": heads}
        yield f"prefill, {heads} heads", indexer_kernel.make_prefill(*lens, **named)
        yield f"some rows, {heads} heads", indexer_kernel.make_prefill(*lens, rows=(5, 12), beyond=70, **named)


def numbers(bench: Bench) -> dict[str, Any]:
    """Answers of the configurations for this card and for others that fit it, the same twice; of both types."""
    errors = {}
    here, _ = (120, 1) if CPU else bench.kernel._device_of(0)
    for name, batch in batches():
        chosen = bench.kernel.configs_of(here)[not batch.paged]
        others = [bench.kernel.configs_of(capability)[not batch.paged] for capability in (80, 120)]
        for config, splits in [(None, None), *((other, splits) for other in others for splits in (1, 3))]:
            if config is not None and config.has_e4m3 and not (CPU or chosen.has_e4m3):
                continue
            out, again = empty(bench, batch), empty(bench, batch)
            indexer_kernel.run(bench.kernel, batch, out, config=config, num_splits=splits)
            full_name = name if config is None else f"{name}, {tuple(config)}, {splits} splits"
            errors[full_name] = bench.check(full_name, batch, out)
            indexer_kernel.run(bench.kernel, batch, again, config=config, num_splits=splits)
            if not torch.equal(out.nan_to_num(7.0), again.nan_to_num(7.0)):
                bench.failures.append(f"{full_name}: another answer the second time")
    if not CPU:
        name, far = "beyond 2**31 elements", decode_batches(1, 400, 300, heads=32)[0]
        out = empty(bench, far, 6_000_000)
        indexer_kernel.run(bench.kernel, far, out)
        errors[name] = bench.check(name, far, out)
    return {"worst": max(errors.values()), "bound": bench.bound, "cases": len(errors), "errors": errors}


def graphs(bench: Bench) -> dict[str, Any]:
    """One capture for each shape, replayed on other inputs: contexts longer and shorter, and padding."""
    errors = {}
    most = 64 if CPU else 3000
    for heads, next_n, requests in itertools.product((32, 64), (1, 2), SIZES.requests[:3]):
        shape: dict[str, Any] = {"heads": heads, "next_n": next_n, "columns": most, "room": most, "device": DEVICE}
        batch = indexer_kernel.make_decode([most] * requests, **shape)
        out = empty(bench, batch)
        call = partial(indexer_kernel.run, bench.kernel, batch, out)
        call()
        replay: Callable[[], None] = call
        if not CPU:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            replay = graph.replay
        for seed in (1, 2, 3):
            contexts = [max(0, most - 41 * seed * place) for place in range(requests)]
            other = indexer_kernel.make_decode(contexts, seed=seed, **shape)
            pairs = [(batch.q.view(torch.uint8), other.q.view(torch.uint8)), (batch.weights, other.weights)]
            for kept, fresh in [*pairs, *((batch.given[name], fresh) for name, fresh in other.given.items())]:
                kept.copy_(fresh)
            out.fill_(float("nan"))
            replay()
            name = f"graph of {requests} requests, {next_n} rows, {heads} heads, replay {seed}"
            errors[name] = bench.check(name, other, out)
    return {"worst": max(errors.values()), "cases": len(errors)}


def decode_batches(
    layers: int, requests: int, context: int, *, heads: int, next_n: int = 1, contexts: list[int] | None = None
) -> list[Batch]:
    """Batches that differ in their keys alone, made on the card: every request with a context of its own, in pages
    that lie anywhere. `contexts` makes some of them shorter."""
    pages = -(-context // PAGE)
    q, weights = indexer_kernel._queries(requests * next_n, heads, torch.Generator().manual_seed(heads))
    q, weights = q.to(DEVICE), weights.to(DEVICE)
    given_lens = contexts or [context] * requests
    ends = [max(0, length - next_n + place + 1) for length in given_lens for place in range(next_n)]
    lens = torch.tensor(ends, dtype=torch.int32, device=DEVICE).view(requests, next_n)
    made = []
    for _ in range(layers):
        cache = torch.empty(requests * pages, PAGE * ROW, dtype=torch.uint8, device=DEVICE)
        keys_of_pages = cache[:, : PAGE * DIM].view(E4M3)
        for some in range(0, len(cache), 65536):  # of float32 there are four times as many bytes
            part = keys_of_pages[some : some + 65536]
            part.copy_(torch.randn(part.shape, device=DEVICE).mul_(100).clamp_(-448, 448))
        scales = cache[:, PAGE * DIM :].view(torch.float32)
        scales.copy_(torch.randint(-9, -3, scales.shape, device=DEVICE).float().exp2())
        table = torch.randperm(requests * pages, device=DEVICE, dtype=torch.int32).view(requests, pages)
        paged = cache.view(-1, PAGE, 1, ROW)
        given = {"kv_cache": paged, "context_lens": lens, "block_table": table}
        keys: Any = Pages(paged, table, context, scales=False)
        factors: Any = Pages(paged, table, context, scales=True)
        made.append(Batch(
            q, weights, keys, factors, [request for request in range(requests) for _ in range(next_n)], [0] * requests,
            [0] * len(ends), ends, context, next_n, given,
        ))  # fmt: skip
    return made


def calls_of(bench: Bench, made: list[Batch], out: torch.Tensor, **options: Any) -> list[Callable[[], None]]:
    return [partial(indexer_kernel.run, bench.kernel, batch, out, **options) for batch in made]


def deep_gemm_call(bench: Bench, batch: Batch) -> Callable[[], torch.Tensor]:
    """As the layer calls DeepGEMM; a step's schedule is made once for all layers, so beforehand."""
    deep_gemm, given = bench.deep_gemm, batch.given
    assert deep_gemm is not None
    if batch.paged:
        schedule = deep_gemm.get_paged_mqa_logits_metadata(given["context_lens"], PAGE, sms())
        q = batch.q.unflatten(0, (-1, batch.next_n))
        lens, table = given["context_lens"], given["block_table"]
        return lambda: deep_gemm.fp8_fp4_paged_mqa_logits(
            (q, None), given["kv_cache"], batch.weights, lens, table, schedule, batch.columns, False
        )
    keys, bounds = (given["k"], given["k_scale"]), (given["starts"], given["ends"])
    return lambda: deep_gemm.fp8_fp4_mqa_logits((batch.q, None), keys, batch.weights, *bounds, clean_logits=False)


def beside(bench: Bench, name: str, made: list[Batch], ours: float, replays: int) -> dict[str, Any]:
    """DeepGEMM on the same batches: held to the reference, its time, and ours as a share of its speed."""
    if bench.deep_gemm is None:
        return {}
    try:
        calls = [deep_gemm_call(bench, batch) for batch in made]
        bench.check(f"DeepGEMM: {name}", made[-1], calls[-1](), beside=False)
        theirs = microseconds([partial(drop, call) for call in calls], replays)
    except Exception as error:
        return {"deep_gemm": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"deep_gemm_us": round(theirs, 2), "speed_of_deep_gemm": round(theirs / ours, 2)}


def drop(call: Callable[[], torch.Tensor]) -> None:
    call()


def decode(bench: Bench) -> list[dict[str, Any]]:
    """One token a request, or two, each request with its own context; and one long context beside short ones."""
    found = []
    shapes: list[tuple[int, int, int, int, list[int] | None]] = [
        (context, requests, heads, 1, None)
        for context, requests, heads in itertools.product(SIZES.contexts, SIZES.requests, (32, 64))
    ]
    middle, many = SIZES.contexts[len(SIZES.contexts) // 2], SIZES.requests[-1]
    shapes += [(middle, requests, 32, 2, None) for requests in SIZES.requests]
    shapes += [(SIZES.contexts[-1], many // 4 or 1, 32, 1, [SIZES.contexts[-1], *[20] * (many // 4 - 1)])]
    for context, requests, heads, next_n, contexts in shapes:
        keys = sum(contexts or [context] * requests)
        layers = min(SIZES.most_calls, max(2, round(COLD / (keys * ROW))))
        made = decode_batches(
            layers if contexts is None else 2, requests, context, heads=heads, next_n=next_n, contexts=contexts
        )
        out = empty(bench, made[0])
        indexer_kernel.run(bench.kernel, made[-1], out)
        ragged = "" if contexts is None else ", the others short"
        name = f"decode of {requests} requests, {next_n} rows, {heads} heads, context {context}{ragged}"
        bench.check(name, made[-1], out)
        time_us = took(calls_of(bench, made, out))
        moved = keys * (ROW + 4 * next_n) + made[0].q.nbytes + made[0].weights.nbytes
        one = {
            "context": context, "requests": requests, "heads": heads, "rows": next_n, "ragged": contexts is not None,
            "us": round(time_us, 2), **share(moved, 2 * DIM * heads * next_n * keys, time_us),
            **beside(bench, name, made, time_us, 15),
        }  # fmt: skip
        found.append(one)
        print(name, one, flush=True)
        del made, out
    return found


def prefill_batch(tokens: int, context: int, heads: int) -> Batch:
    """A chunk that ends a context, with its keys gathered."""
    q, weights = indexer_kernel._queries(tokens, heads, torch.Generator().manual_seed(heads))
    k = torch.randn(context, DIM, device=DEVICE).mul_(100).clamp_(-448, 448).to(E4M3)
    k_scale = torch.randint(-9, -3, (context,), device=DEVICE).float().exp2()
    ends = list(range(context - tokens + 1, context + 1))
    given = {
        "k": k, "k_scale": k_scale,
        "starts": torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
        "ends": torch.tensor(ends, dtype=torch.int32, device=DEVICE),
    }  # fmt: skip
    return Batch(
        q.to(DEVICE), weights.to(DEVICE), [k], [k_scale], [0] * tokens, [0], [0] * tokens, ends, context, 1, given
    )


def prefill(bench: Bench) -> list[dict[str, Any]]:
    """A chunk of tokens at the end of one context."""
    found = []
    for context, heads in itertools.product(SIZES.prefixes, (32, 64)):
        batch = prefill_batch(SIZES.chunk, context, heads)
        out = empty(bench, batch)
        indexer_kernel.run(bench.kernel, batch, out)
        name = f"prefill of {SIZES.chunk} tokens, {heads} heads, context {context}"
        bench.check(name, batch, out)
        time_us = took(calls_of(bench, [batch], out), 5)
        pairs = sum(batch.ends)
        one = {
            "context": context, "tokens": SIZES.chunk, "heads": heads, "us": round(time_us, 1),
            "tflops": round(2 * DIM * heads * pairs / time_us / 1e6, 1),
            **share(pairs * 4 + context * ROW + batch.q.nbytes, 2 * DIM * heads * pairs, time_us),
            **beside(bench, name, [batch], time_us, 5),
        }  # fmt: skip
        found.append(one)
        print(name, one, flush=True)
        del batch, out
    return found


def configs(bench: Bench) -> list[dict[str, Any]]:
    """How the choice for this card compares with others, for few shapes: the five fastest of each and the choice."""
    found = []
    make = bench.kernel.IndexerConfig
    chosen = bench.kernel.configs_of(bench.kernel._device_of(0)[0])
    has_e4m3 = chosen[0].has_e4m3
    small = SIZES.contexts[0] if CPU else 0
    cases: list[tuple[str, list[Batch], int]] = [
        *(
            (f"decode of {requests} requests, {rows} rows, {heads} heads, context {context}",
             decode_batches(min(SIZES.most_calls, max(2, round(COLD / (requests * context * ROW)))),
                            requests, context, heads=heads, next_n=rows), 0)
            for requests, context, heads, rows in (
                [(2, small, 32, 1)] if CPU else
                [(1, 32768, 32, 1), (1, 131072, 32, 1), (8, 32768, 32, 1), (32, 32768, 32, 1), (128, 32768, 32, 1),
                 (8, 32768, 32, 2), (32, 32768, 64, 1)]
            )
        ),
        *(
            (f"prefill of {SIZES.chunk} tokens, {heads} heads, context {SIZES.prefixes[-1]}",
             [prefill_batch(SIZES.chunk, SIZES.prefixes[-1], heads)], 1)
            for heads in ((32,) if CPU else (32, 64))
        ),
    ]  # fmt: skip
    for name, made, kind in cases:
        grid = itertools.product(
            (64, 128, 256) if kind else (64,), (64, 128, 256), (4, 8), (2, 3) if kind else (2, 3, 4), (4, 8, 16)
        )
        # What a thread holds of a product decides, and more than half of its registers is too much.
        sensible = [values for values in grid if 1 <= values[0] * values[1] // (1024 * values[2]) <= 4]
        candidates = [chosen[kind], *(make(*values, has_e4m3) for values in sensible)]
        times = {}
        out = empty(bench, made[0])
        for config in candidates[:3] if CPU else dict.fromkeys(candidates):
            try:
                times[config] = took(calls_of(bench, made, out, config=config), 3)
            except Exception as error:  # too much shared memory or too many registers
                print(name, tuple(config), f"{type(error).__name__}: {str(error)[:100]}", flush=True)
        fastest = sorted(times, key=lambda config: times[config])[:5]
        one = {
            "case": name, "chosen": [*chosen[kind], round(times[chosen[kind]], 2)],
            "fastest": [[*config, round(times[config], 2)] for config in fastest], "tried": len(times),
        }  # fmt: skip
        found.append(one)
        print(one, flush=True)
    return found


def share(moved: int, flops: int, time_us: float) -> dict[str, Any]:
    """The floor: what bytes and products take at the datasheet's rates, whichever is more."""
    rates = None if CPU else CARDS.get(torch.cuda.get_device_name())
    if rates is None:
        return {}
    floors = {"memory": moved / rates[0] * 1e6, "products": flops / rates[1] * 1e6}
    bound = max(floors, key=lambda kind: floors[kind])
    return {"floor_us": round(floors[bound], 2), "bound": bound, "share_of_floor": round(floors[bound] / time_us, 3)}


def main() -> int:
    """Run the parts that were asked for, all if none, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--commit", default="", help="what the tree is that this runs in")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    deep_gemm = load_deep_gemm()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "card": "none" if CPU else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "deep_gemm": None if deep_gemm is None else getattr(deep_gemm._import_deep_gemm(), "__version__", "unknown"),
        "commit": options.commit,
        "covers": [
            "tests/gpu/triton_indexer.py",
            "tests/patches/indexer_kernel.py",
            *sorted(path.relative_to(ROOT).as_posix() for path in PATCHES),
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(load_kernel(Path(folder)), deep_gemm)
        for part in options.part or PARTS:
            started = time.monotonic()
            try:
                record[part] = globals()[part](bench)
            except Exception as error:
                bench.failures.append(f"{part}: {type(error).__name__}: {error}")
            record["failures"] = bench.failures
            options.output.write_text(to_text(record), encoding="utf-8")
            print(f"{part}: {time.monotonic() - started:.0f} s, failures so far:", bench.failures, flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
