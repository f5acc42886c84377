"""Times loading a GGUF model of real GLM-5 dimensions, rank by rank, beside a plain read of its file; prints JSON.

    python tests/bench/loading.py --python STACK/bin/python [--ranks 1 2 8] [--save]

With the patch that reads a file once for all ranks, and without it. One dense and one mixture-of-experts layer with the
embeddings, 8.5 GB of random blocks in the types of UD-Q4_K_XL; ranks are processes on the CPU that keep the quantized
blocks; each load starts with none of the file in the page cache. All ranks load at once, and one alone while the others
wait: what it had to read then is what it needs. Ranks that do not fit into the free memory are not measured, and the
result says so.

`read_of_file`: bytes that all ranks together had from the disk, as a part of the file. `read_again_of_file`: what the
whole machine read again because it had been evicted: memory was short. `cpu_seconds` do not depend on what else runs,
`seconds` do. `--save` writes the result beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("module_utils", "tests/unit", "tests/patches"))]

import overlay  # found through the lines above
from gguf_writer import Data, header
from octoserve import patches
from octoserve.gguf import GGML_TYPES

from tests.bench.loading_ranks import forget
from tests.fixtures import glm5_header
from tests.fixtures.tiny_glm.shapes import GlmShape

SERIES = "files/patches/vllm-0.32.0"
PATCH = "read-a-file-once-for-all-ranks"
COVERS = [SERIES, "tests/bench/loading.py", "tests/bench/loading_ranks.py", "tests/patches/ranks.py"]
BLOCKS = glm5_header.Blocks(layers=2, dense=1, mtp=0)
MIX = glm5_header.GLM_5_2
READ = 8 << 20
#: Where the half-precision scales of a block lie; their exponents are set, so that no value is infinite.
SCALES = {"Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def write_model(folder: Path) -> Path:
    """Write the model and its config."""
    path = folder / "model.gguf"
    tensors = glm5_header.tensors(MIX, BLOCKS)
    pools = {kind: random_blocks(kind) for kind in {tensor.kind for tensor in tensors.values()}}
    with path.open("wb") as file:
        file.write(header(glm5_header.metadata(BLOCKS), tensors))
        for tensor in tensors.values():
            write_data(file, tensor, pools[tensor.kind])
        file.flush()
        os.fsync(file.fileno())
    shape = GlmShape(
        vocabulary=glm5_header.VOCABULARY, hidden=glm5_header.HIDDEN, layers=BLOCKS.layers, dense_layers=BLOCKS.dense,
        heads=glm5_header.HEADS, q_lora=glm5_header.Q_LORA, intermediate=glm5_header.INTERMEDIATE,
        moe_intermediate=glm5_header.MOE_INTERMEDIATE, experts=glm5_header.EXPERTS, experts_per_token=8,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**shape.config(), "dtype": "bfloat16"}))
    return path


def random_blocks(kind: int) -> bytearray:
    """About 8 MB of random blocks of a type, of finite values."""
    name, _, size = GGML_TYPES[kind]
    count = READ // size
    pool = bytearray(os.urandom(count * size))
    high = (3,) if name == "F32" else tuple(at + 1 for at in SCALES[name])
    for at in high:
        pool[at::size] = b"\x2c" * count
    return pool


def write_data(file: Any, tensor: Data, pool: bytearray) -> None:
    left, view = len(tensor.data), memoryview(pool)
    padding = -left % 32
    while left:
        left -= file.write(view[: min(left, len(view))])
    file.write(bytes(padding))


def plain_read(path: Path) -> float:
    """Seconds of reading the file from its start to its end, as dd does."""
    forget(str(path))
    buffer = bytearray(READ)
    started = time.monotonic()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.monotonic() - started


def refaulted() -> int:
    """Bytes that this machine has read again after they had been evicted from the page cache."""
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counters["workingset_refault_file"]) * os.sysconf("SC_PAGE_SIZE")


def room(size: int, ranks: int, loading: int, whole_tensors: bool) -> str:
    """Why so many ranks may not load at once, empty where they may: the kernel would end one, or somebody else."""
    each = size // ranks + (size if whole_tensors else 0) // 2 + (1 << 30)
    free = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    needed, found = loading * each / 1e9, int(free) * 1024 / 1e9
    return "" if needed < found else f"not measured: takes about {needed:.0f} GB of memory, {found:.0f} GB are free"


def load(python: str, site: Path, model: Path, ranks: int, loading: int) -> list[dict[str, Any]]:
    """What each of so many ranks says of a cold load."""
    done = subprocess.run(
        [python, str(Path(__file__).with_name("loading_ranks.py")), str(model), str(ranks), str(loading)],
        env={
            **os.environ,
            "PYTHONPATH": str(site),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{ranks} ranks ended with {done.returncode}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def measure(python: str, site: Path, model: Path, ranks: int, loading: int) -> dict[str, Any]:
    """The ranks, and what they come to together."""
    size, before = model.stat().st_size, refaulted()
    found = load(python, site, model, ranks, loading)
    again = refaulted() - before
    seconds = max(rank["seconds"] for rank in found)
    return {
        "seconds": seconds,
        "gb_s": round(size / seconds / 1e9, 3),
        "read_of_file": round(sum(rank["read_bytes"] for rank in found) / size, 3),
        "read_again_of_file": round(again / size, 3),
        "ranks": found,
    }


def machine(folder: Path) -> str:
    """Cores, memory and disk in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    device = folder.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    disk = "virtual disk" if block.name.startswith("vd") else f"disk {block.name}"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, {disk}"


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--model", type=Path, help="a model that was written before, to be kept")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="loading-") as name:
        folder = Path(name)
        model = options.model or write_model(folder)
        size = model.stat().st_size
        report: dict[str, Any] = {
            "commit": git("rev-parse", "HEAD"),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "covers": COVERS,
            "command": f"tests/bench/loading.py --ranks {' '.join(map(str, options.ranks))}",
            "machine": machine(folder),
            "versions": versions(options.python),
            "bytes": size,
            "plain_read_gb_s": [],
            "loads": {},
        }
        series = patches.load_series(ROOT / SERIES)
        without = patches.Series(tuple(patch for patch in series.patches if PATCH not in patch.file))
        assert len(without.patches) == len(series.patches) - 1, f"{SERIES} has no patch {PATCH}"
        for label, which in (("without the patch", without), ("with it", series)):
            site = folder / label.replace(" ", "-")
            overlay.build(site, patches.site_packages_of(options.python), which)
            for ranks in options.ranks:
                for loading in sorted({1, ranks}):
                    reason = room(size, ranks, loading, which is without)
                    if not reason:
                        report["plain_read_gb_s"].append(round(size / plain_read(model) / 1e9, 3))
                    report["loads"][f"{loading} of {ranks} ranks, {label}"] = reason or measure(
                        options.python, site, model, ranks, loading
                    )
        text = json.dumps(report, indent=1)
        print(text)
        if options.save:
            Path(__file__).with_suffix(".json").write_text(text + "\n")


def versions(python: str) -> dict[str, str]:
    """Of the stack's distributions that load."""
    names = ("vllm-cpu", "vllm-gguf-plugin", "torch", "gguf", "transformers")
    code = f"from importlib.metadata import version as v; import json; print(json.dumps({{n: v(n) for n in {names}}}))"
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return found


def git(*arguments: str) -> str:
    """What git says in the project."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
