"""Fabric check: does an all-reduce over all cards end, how long does it take, and are its values right?

    python -m octoserve.fabric_check --ranks 8 [--backend nccl] [--timeout 30] [--setup 180]

Run by a release's own Python, which has torch, in the service's environment, while the cards are free: seconds, before
an hour of loading. A machine whose IOMMU or ACS breaks peer-to-peer traffic hangs here, or reads wrong values.

Each rank is a process of its own. Rank r of n contributes (r + 1) * k to each element, k its index modulo 251, so that
the sum k * n * (n + 1) / 2 is exact in float32. One JSON document on stdout: ``{"ok", "ranks", "backend", "seconds",
"sizes": [{"bytes", "median_us", "bus_gb_s"}]}``; bus bandwidth as in NVIDIA's nccl-tests, bytes / time * 2 (n - 1) / n.
Ends 0 where all is right, 1 else, with the reason as one line on stderr.
"""

from __future__ import annotations

import argparse
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

#: Seconds for what comes before any traffic: torch read from a disk whose cache holds the model, and CUDA's contexts.
SETUP_S = 180.0
#: The step before the ranks meet.
START = "its start"
#: What a decode step, a small prefill and a large one reduce, bytes.
SIZES = (16 * 1024, 1024 * 1024, 64 * 1024 * 1024)
ROUNDS = 7
PATTERN = 251
POLL_S = 0.05
ADVICE = (
    "look at the findings IOMMU, ACS and P2P of `site.yml --tags preflight`; where the machine cannot be changed, "
    "NCCL_P2P_DISABLE=1 in the profile's serve.env makes it slower and right"
)
SETUP_ADVICE = (
    "no card has sent anything yet: torch is loaded and CUDA opens a card; look at the release's disk and the driver "
    "(`nvidia-smi`, `journalctl -k --grep 'NVRM|Xid'`); where it is only slow, set vllm_service_fabric_setup higher"
)


class FabricError(RuntimeError):
    """The ranks did not meet, or the all-reduce hung, failed, or gave wrong values."""


def check(
    ranks: int, backend: str, timeout_s: float, setup_s: float = SETUP_S, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Run every rank and put their results together. Raises FabricError.

    Who does not end is killed, and not waited for: one that hangs in the driver would keep the reason from being said.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "octoserve.fabric_check", f"--ranks={ranks}", f"--backend={backend}"]
        command += [f"--folder={folder}", "--sizes", *map(str, sizes)]
        children = []
        try:
            for rank in range(ranks):
                with (folder / f"{rank}.log").open("w") as log:
                    child = subprocess.Popen([*command, f"--rank={rank}"], stdout=log, stderr=subprocess.STDOUT)
                children.append(child)
            met, codes = watch(folder, children, timeout_s, setup_s)
            said = [(folder / f"{rank}.log").read_text(errors="replace").splitlines() for rank in range(ranks)]
            judge(
                codes, steps(folder, ranks), said, f"{timeout_s:g} s of the ranks' meeting" if met else f"{setup_s:g} s"
            )
            results = [result_of(folder, rank) for rank in range(ranks)]
        finally:
            for child in children:
                child.kill()
    return together(results, ranks, backend, time.monotonic() - began)


def watch(
    folder: Path, children: Sequence[subprocess.Popen[bytes]], timeout_s: float, setup_s: float
) -> tuple[bool, list[int | None]]:
    """Until every rank has ended, one has failed, or their time is over: whether they met, and their exit codes."""
    until, met = time.monotonic() + setup_s, False
    while True:
        codes = [child.poll() for child in children]
        if all(code is not None for code in codes) or any(codes) or time.monotonic() > until:
            return met, codes
        if not met and START not in steps(folder, len(children)):
            until, met = time.monotonic() + timeout_s, True
        time.sleep(POLL_S)


def result_of(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank left. Raises FabricError."""
    path = folder / f"{rank}.result"
    if not path.exists():
        raise FabricError(f"rank {rank} ended well and left no result; {SETUP_ADVICE}")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def steps(folder: Path, ranks: int) -> list[str]:
    """What each rank is at. Not read from its output, where torch and NCCL say whatever they like."""
    found = [folder / f"{rank}.step" for rank in range(ranks)]
    return [path.read_text() if path.exists() else START for path in found]


def judge(codes: Sequence[int | None], at: Sequence[str], said: Sequence[Sequence[str]], bound: str) -> None:
    """Raise FabricError unless every rank ended well.

    ``codes``: None for a rank that had not ended. ``at``: its step. ``said``: its output. ``bound``: time that is over.
    """
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        rank = failed[0]
        last = next((line for line in reversed(said[rank]) if line.strip()), "it said nothing")
        raise FabricError(f"rank {rank} of {len(codes)}: {last}; {SETUP_ADVICE if at[rank] == START else ADVICE}")
    hung = [rank for rank, code in enumerate(codes) if code is None]
    if hung:
        where = ", ".join(f"rank {rank} in {at[rank]}" for rank in hung)
        advice = SETUP_ADVICE if START in [at[rank] for rank in hung] else ADVICE
        raise FabricError(f"not done within {bound}: {where}; {advice}")


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


def be_rank(rank: int, ranks: int, backend: str, folder: Path, sizes: Sequence[int]) -> None:
    """Reduce, say before each step what it is, leave the result. Raises ValueError for wrong values, else torch's."""
    import torch
    from torch import distributed

    def say(step: str) -> None:
        _write(folder / f"{rank}.step", step)

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # opens the card
    say("the meeting of the ranks")
    distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rounds: dict[str, list[float]] = {}
    for size in sizes:
        pattern = (torch.arange(size // 4, device=device) % PATTERN).to(torch.float32)
        wanted = pattern * (ranks * (ranks + 1) // 2)
        rounds[str(size)] = []
        for number in range(ROUNDS):
            say(f"all-reduce {number + 1} of {size} bytes")
            values = pattern * (rank + 1)
            seconds = _timed(partial(distributed.all_reduce, values), backend)
            wrong = int((values != wanted).sum())
            if wrong:
                raise ValueError(f"{wrong} of {size // 4} values of an all-reduce of {size} bytes are wrong")
            if number:  # the first one connects the ranks
                rounds[str(size)].append(seconds)
    say("its end")
    _write(folder / f"{rank}.result", json.dumps({"rounds": rounds}))
    distributed.destroy_process_group()


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


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
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds from the meeting of the ranks on")
    parser.add_argument("--setup", type=float, default=SETUP_S, help="seconds until the ranks have met")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of each all-reduce")
    parser.add_argument("--rank", type=int, help="be this rank (for the parent's use)")
    parser.add_argument("--folder", type=Path, help="where the ranks meet (for the parent's use)")
    options = parser.parse_args(argv)
    if options.rank is not None:
        be_rank(options.rank, options.ranks, options.backend, options.folder, options.sizes)
        return 0
    try:
        result = check(options.ranks, options.backend, options.timeout, options.setup, options.sizes)
    except FabricError as error:
        print(f"octoserve.fabric_check: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**result, "line": describe(result)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
