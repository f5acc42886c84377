"""Times the merge job (merge, verification, SHA-256, fsync) against cp of the same bytes; prints JSON.

    python tests/bench/merge_speed.py --tool BIN/llama-gguf-split [--gib 4] [--folder DIR] [--rounds 3]

cp is timed alone and together with an fsync of what it wrote, which the merge job always does. The goal is half
the speed of cp or better: ratio >= 0.5. `ratio` compares with cp and its fsync, `ratio_to_cp_unsynced` with cp alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "tests" / "unit")]

from gguf_writer import Data, Unwritten, header, i32, tiny_metadata, u16  # found through the lines above
from octoserve.job import read_state, write_json  # as above

SPLITS, TENSORS = 4, 4
BLOCK = 64 << 20


def write_splits(folder: Path, size: int) -> list[Path]:
    """Write a split set with `size` bytes of random, repeated data."""
    rows = size // (SPLITS * TENSORS * 256 * 4)
    data = Unwritten(rows * 256 * 4)
    block = os.urandom(BLOCK)
    paths = []
    for number in range(SPLITS):
        tensors = {
            f"blk.{number}.ffn_{name}.weight": Data((256, rows), 0, data) for name in ("up", "gate", "down", "x")
        }
        keys = {
            **(tiny_metadata(SPLITS) if number == 0 else {}),
            "split.no": u16(number),
            "split.count": u16(SPLITS),
            "split.tensors.count": i32(SPLITS * TENSORS),
        }
        path = folder / f"bench-{number + 1:05}-of-{SPLITS:05}.gguf"
        with path.open("wb") as file:
            file.write(header(keys, tensors))
            left = TENSORS * len(data)
            while left:
                left -= file.write(memoryview(block)[: min(left, BLOCK)])
        paths.append(path)
    return paths


def time_cp(paths: list[Path], target: Path) -> tuple[float, float]:
    """Return seconds of cp, and of cp with fsync."""
    os.sync()
    target.mkdir()
    started = time.monotonic()
    subprocess.run(["cp", "--reflink=never", *map(str, paths), str(target)], check=True)
    copied = time.monotonic() - started
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    synced = time.monotonic() - started
    shutil.rmtree(target)
    return copied, synced


def time_merge(paths: list[Path], folder: Path, tool: Path) -> float:
    """Return seconds of the job's process, from start to end."""
    output, state, spec = folder / "merged.gguf", folder / "state.json", folder / "spec.json"
    write_json(folder / "secrets.json", {})
    write_json(state, {"state": "running"})
    order = {
        "spec": {
            "tool": str(tool),
            "splits": list(map(str, paths)),
            "made_from": {path.name: "bench" for path in paths},
            "output": str(output),
            "receipt_dir": str(folder),
            "sha256": None,
        },
        "state": str(state),
        "secrets": str(folder / "secrets.json"),
    }
    write_json(spec, order)
    for path in paths:  # in the page cache, as for cp
        subprocess.run(["cat", str(path)], check=True, stdout=subprocess.DEVNULL)
    os.sync()
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "octoserve.merge_worker", str(spec)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "module_utils")},
    )
    seconds = time.monotonic() - started
    if read_state(state)["state"] != "done":
        raise SystemExit(f"the merge failed: {read_state(state)}")
    output.unlink()
    (folder / "receipt.json").unlink()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        paths = write_splits(folder, int(options.gib * (1 << 30)))
        size = sum(path.stat().st_size for path in paths)
        copied, synced, merged = [], [], []
        for _ in range(options.rounds):
            seconds = time_cp(paths, folder / "copy")
            copied.append(seconds[0])
            synced.append(seconds[1])
            merged.append(time_merge(paths, folder, options.tool))
    cp, cp_synced, merge = map(statistics.median, (copied, synced, merged))
    report = {
        "bytes": size,
        "cpus": os.cpu_count(),
        "cp_s": copied,
        "cp_fsync_s": synced,
        "merge_s": merged,
        "merge_gb_s": size / merge / 1e9,
        "ratio": cp_synced / merge,
        "ratio_to_cp_unsynced": cp / merge,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
