"""Fabric check: does an all-reduce over all cards end, how long does it take, and are its values right?

    python -m octoserve.fabric_check --ranks 8 [--backend nccl] [--timeout 30]

Run by a release's own Python, which has torch, in the service's environment, while the cards are free: seconds, before
an hour of loading. A machine whose IOMMU or ACS breaks peer-to-peer traffic hangs here, or reads wrong values.

Each rank is a process of its own. Rank r of n contributes (r + 1) * k to each element, k its index modulo 251, so that
the sum k * n * (n + 1) / 2 is exact in float32. One JSON document on stdout: ``{"ok", "ranks", "backend", "seconds",
"sizes": [{"bytes", "median_us", "bus_gb_s"}]}``; bus bandwidth as in NVIDIA's nccl-tests, bytes / time * 2 (n - 1) / n.
Ends 0 where all is right, 1 else, with the reason as one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

#: What a decode step, a small prefill and a large one reduce, bytes.
SIZES = (16 * 1024, 1024 * 1024, 64 * 1024 * 1024)
ROUNDS = 7
PATTERN = 251
POLL_S = 0.05
ADVICE = (
    "look at the findings IOMMU, ACS and P2P of `site.yml --tags preflight`; where the machine cannot be changed, "
    "NCCL_P2P_DISABLE=1 in the profile's serve.env makes it slower and right"
)


class FabricError(RuntimeError):
    """The all-reduce hung, failed, or gave wrong values."""


def check(ranks: int, backend: str, timeout_s: float, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Run every rank and put their results together. Raises FabricError."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "octoserve.fabric_check", f"--ranks={ranks}", f"--backend={backend}"]
        command += [f"--store={folder}/store", "--sizes", *map(str, sizes)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(ranks)]
        with contextlib.ExitStack() as stack:
            children = []
            for rank, log in enumerate(logs):
                output = stack.enter_context(log.open("w"))
                child = subprocess.Popen([*command, f"--rank={rank}"], stdout=output, stderr=subprocess.STDOUT)
                stack.callback(child.wait)
                stack.callback(child.kill)
                children.append(child)
            while any(child.poll() is None for child in children):
                if any(child.poll() for child in children) or time.monotonic() - began > timeout_s:
                    break
                time.sleep(POLL_S)
            codes = [child.poll() for child in children]
        said = [log.read_text(errors="replace").splitlines() for log in logs]
    judge(codes, said, timeout_s)
    return together([json.loads(lines[-1]) for lines in said], ranks, backend, time.monotonic() - began)


def judge(codes: Sequence[int | None], said: Sequence[Sequence[str]], timeout_s: float) -> None:
    """Raise FabricError unless every rank ended well. ``codes``: None for a rank that had not ended."""
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        last = next((line for line in reversed(said[failed[0]]) if line.strip()), "it said nothing")
        raise FabricError(f"rank {failed[0]} of {len(codes)}: {last}; {ADVICE}")
    hung = [f"rank {rank} in {(said[rank] or ['its start'])[-1]}" for rank, code in enumerate(codes) if code is None]
    if hung:
        raise FabricError(f"not done after {timeout_s:.0f} s: {', '.join(hung)}; {ADVICE}")


def together(results: Sequence[Mapping[str, Any]], ranks: int, backend: str, seconds: float) -> dict[str, Any]:
    """One document of all ranks: the slowest counts. ``results``: seconds of each round by size in bytes."""
    sizes = []
    for size in results[0]["rounds"]:
        slowest = [max(moments) for moments in zip(*(result["rounds"][size] for result in results))]
        median = statistics.median(slowest)
        bus = int(size) / median * 2 * (ranks - 1) / ranks / 1e9
        sizes.append({"bytes": int(size), "median_us": round(median * 1e6, 1), "bus_gb_s": round(bus, 2)})
    return {"ok": True, "ranks": ranks, "backend": backend, "seconds": round(seconds, 1), "sizes": sizes}


def describe(result: Mapping[str, Any]) -> str:
    """The result in a line."""
    parts = [f"{size['bytes'] // 1024} KiB in {size['median_us']} us" for size in result["sizes"]]
    largest = result["sizes"][-1]
    return (
        f"all-reduce over {result['ranks']} ranks ({result['backend']}): {', '.join(parts)}, "
        f"{largest['bus_gb_s']} GB/s on the bus, every value right ({result['seconds']} s)"
    )


def be_rank(rank: int, ranks: int, backend: str, store: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Reduce, and say before each step what it is. Raises ValueError for wrong values, torch's errors for the rest."""
    print("its start", flush=True)
    import torch
    from torch import distributed

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    print("the meeting of the ranks", flush=True)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    rounds: dict[str, list[float]] = {}
    for size in sizes:
        pattern = (torch.arange(size // 4, device=device) % PATTERN).to(torch.float32)
        wanted = pattern * (ranks * (ranks + 1) // 2)
        rounds[str(size)] = []
        for number in range(ROUNDS):
            print(f"all-reduce {number + 1} of {size} bytes", flush=True)
            values = pattern * (rank + 1)
            seconds = _timed(partial(distributed.all_reduce, values), backend)
            wrong = int((values != wanted).sum())
            if wrong:
                raise ValueError(f"{wrong} of {size // 4} values of an all-reduce of {size} bytes are wrong")
            if number:  # the first one connects the ranks
                rounds[str(size)].append(seconds)
    distributed.destroy_process_group()
    return {"rounds": rounds}


def _timed(reduce: Any, backend: str) -> float:
    import torch

    def wait() -> None:
        if backend == "nccl":
            torch.cuda.synchronize()

    wait()
    began = time.perf_counter()
    reduce()
    wait()
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Be the parent, or with --rank one of the ranks."""
    parser = argparse.ArgumentParser(prog="octoserve.fabric_check", description="A timed all-reduce, values checked.")
    parser.add_argument("--ranks", type=int, required=True, help="number of cards")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl", help="gloo: on the CPU")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of each all-reduce")
    parser.add_argument("--rank", type=int, help="be this rank (for the parent's use)")
    parser.add_argument("--store", help="file where the ranks meet (for the parent's use)")
    options = parser.parse_args(argv)
    if options.rank is not None:
        result = be_rank(options.rank, options.ranks, options.backend, options.store, options.sizes)
        print(json.dumps(result), flush=True)
        return 0
    try:
        result = check(options.ranks, options.backend, options.timeout, options.sizes)
    except FabricError as error:
        print(f"octoserve.fabric_check: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**result, "line": describe(result)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
