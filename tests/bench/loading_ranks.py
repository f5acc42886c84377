"""Loads one GGUF model as tensor-parallel ranks on the CPU and says what each rank read and held.

``loading_ranks.py MODEL.gguf RANKS LOADING`` runs in the stack's interpreter and prints one line of JSON: for each rank
that loads its seconds, bytes and peaks. The ranks are processes with a gloo group, layers keep the file's quantized
blocks, and loading goes the way that vLLM goes: model, weights, post-processing. config.json lies beside the model. The
first LOADING ranks load, at once, with none of the file in the page cache; the others wait.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "patches"))
import ranks  # found through the line above

#: Seconds between two looks at the memory.
INTERVAL = 0.02


def table(path: str) -> dict[str, int]:
    """A file of /proc/self as numbers; memory in bytes."""
    rows = (line.replace(":", " ").split() for line in Path("/proc/self", path).read_text().splitlines())
    return {row[0]: int(row[1]) << (10 if row[2:] == ["kB"] else 0) for row in rows if row[1:] and row[1].isdigit()}


class Peak:
    """The highest RssAnon and RssFile, in bytes, while it runs."""

    def __init__(self) -> None:
        self.start = table("status")["RssAnon"]
        self.anonymous, self.mapped = 0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(INTERVAL):
            status = table("status")
            self.anonymous = max(self.anonymous, status["RssAnon"])
            self.mapped = max(self.mapped, status["RssFile"])


def forget(path: str) -> None:
    """Drop the file from the page cache; raise RuntimeError where it stays."""
    with Path(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", path]
    resident = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if resident > Path(path).stat().st_size // 100:
        raise RuntimeError(f"{path}: {resident} bytes stay in the page cache, wanted none: this is no cold start")


def join(loading: int, model: str, rank: int, size: int, port: int) -> dict[str, Any] | None:
    """Be one rank; load and measure, or wait for those that do."""
    import torch

    with ranks.joined(model, rank, size, port, "bfloat16") as config:
        if rank == 0:
            forget(model)
        torch.distributed.barrier()
        found = {"rank": rank, **load(config)} if rank < loading else None
        torch.distributed.barrier()
    return found


def load(config: Any) -> dict[str, Any]:
    """Load, measure and let go."""
    from torch.nn.parameter import is_lazy
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(config.load_config)
    before, started, busy = table("io"), time.monotonic(), time.process_time()
    with Peak() as peak:
        loaded = loader.load_model(config, config.model_config)
    seconds, busy, after = time.monotonic() - started, time.process_time() - busy, table("io")
    held = sum(tensor.numel() * tensor.element_size() for tensor in loaded.parameters() if not is_lazy(tensor))
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(busy, 2),
        "read_bytes": after["read_bytes"] - before["read_bytes"],
        "rchar": after["rchar"] - before["rchar"],
        "weights_bytes": held,
        "anonymous_peak_bytes": peak.anonymous - peak.start,
        "mapped_peak_bytes": peak.mapped,
    }


def main() -> None:
    """Start the ranks and print what they say."""
    model, size, loading = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's own output goes to stderr
    found = [result for result in ranks.run(functools.partial(join, loading), model, size) if result]
    os.write(out, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main()
