#!/usr/bin/env python3
"""Proves the patched loader on real cards: every case and mutation of loader.yml, each in a process of its own.

    loader_proof.py MODELS OUT [--cases FILE] [--python PYTHON] [--jobs N] [--only NAME,NAME] [--cpu]

MODELS is the folder that loader_models.py wrote. OUT gets ``loader_proof.json`` (what was run, on what, and each
result) and ``logs/``. PYTHON is the interpreter of an installed, unpatched CUDA stack, default this one; the patches
are laid over it (tests/patches/overlay.py). Cases run beside each other, as many as --jobs, on as many cards as there
are; those of two ranks are left out with one card. With --cpu, a dry run of the machinery on a CPU stack: dense,
float32, without CUDA's own options. Ends 0 only where every case held its bounds and every mutation broke them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "tests/patches")]

import overlay
import yaml
from octoserve import patches

SERIES = ROOT / "files/patches/vllm-0.32.0"
_MADE_BY = ("loader_models", "loader_serve", "mtp_head")
COVERS = ["files/patches/vllm-0.32.0", *(f"tests/gpu/{name}.py" for name in _MADE_BY)]
LIMIT = 300  # seconds for one case
ENOUGH = 50  # decided positions, of which a share says something
OPERATORS = {"ggml_dequantize", "ggml_mul_mat_vec_a8", "ggml_mul_mat_a8", "ggml_moe_a8", "ggml_moe_a8_vec"}
OPTIONS = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 2 * 1024**3,
    "gpu_memory_utilization": 0.1,  # of a card that several cases share
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,
}
#: On a CPU: what serves there, and does the same sums as transformers.
CPU_OPTIONS = {"dtype": "float32", "attention_backend": "CPU_MLA", "enforce_eager": True, "max_num_seqs": 8}


@dataclass(frozen=True)
class Case:
    """A case or a mutation as loader.yml has it."""

    name: str
    fields: dict[str, Any]

    @property
    def ranks(self) -> int:
        return int(self.fields.get("ranks", 1))

    @property
    def mutation(self) -> bool:
        return "fails_with" in self.fields


def load_document(cases: str = "loader.yml") -> dict[str, Any]:
    """loader.yml: models, bounds, cases, mutations; of another file its cases and mutations, and bounds over those."""
    document: dict[str, Any] = yaml.safe_load((HERE / "loader.yml").read_text(encoding="utf-8"))
    if cases != "loader.yml":
        other = yaml.safe_load((HERE / cases).read_text(encoding="utf-8"))
        bounds = {**document["bounds"], **other.get("bounds", {})}
        document |= {"cases": other["cases"], "mutations": other.get("mutations", {}), "bounds": bounds}
    return {part: document[part] for part in ("models", "bounds", "cases", "mutations")}


def load_cases(document: dict[str, Any]) -> list[Case]:
    """Those of two ranks last: they take every card."""
    found = [Case(name, fields) for part in ("cases", "mutations") for name, fields in document[part].items()]
    return sorted(found, key=lambda case: case.ranks)


def request(case: Case, model: dict[str, Any], folder: Path, cpu: bool) -> dict[str, Any]:
    """What loader_serve.py is asked for, and the variables that it gets."""
    has_indexer = "trained" in model or "index_topk" in model["shape"]
    options = dict(case.fields.get("options", {}))
    if cpu:
        options.pop("attention_backend", None)
        options = ({"hf_overrides": {"index_topk": 0}} if has_indexer else {}) | options | CPU_OPTIONS
    else:
        options = OPTIONS | options
    dense = cpu or case.fields.get("dense", not has_indexer)
    return {
        "folder": str(folder / case.fields["model"]),
        "greedy": bool(model.get("trained")),
        "attention": "dense" if dense else "sparse",
        "watch": case.fields.get("watch", False),
        "environment": case.fields.get("environment", {}),
        "options": options | {"max_model_len": model["max_model_len"], "tensor_parallel_size": case.ranks},
    }


def verdict(case: Case, document: dict[str, Any], asked: dict[str, Any], result: dict[str, Any], cpu: bool) -> str:
    """`ok`, or what does not hold."""
    bounds, model = document["bounds"], document["models"][case.fields["model"]]
    wanted = case.fields.get("fails_with")
    if "error" in result:
        found = str(result["error"])
        expected = wanted is not None and wanted not in ("difference", "accepted") and re.search(wanted, found)
        return "ok" if expected else f"wanted {wanted or 'an answer'}, found {found}"
    differs = broken(result["comparison"], asked["attention"], bool(model.get("routed")), bounds)
    rejected = ""
    if (speculative := result.get("speculative")) is not None:
        share = speculative.get("accepted", 0) / max(1, speculative.get("drafted", 0))
        least = bounds["accepted"].get(case.name, bounds["accepted"]["default"])
        rejected = f"accepted {share:.2f} of the drafted tokens" if share < least else ""
    if wanted == "accepted":
        return "; ".join(differs) or ("ok" if rejected else "the fault is not seen")
    if wanted == "difference":
        return "ok" if differs else "the fault is not seen"
    if wanted:
        return f"wanted an error like {wanted}, found none"
    faults = [*differs, rejected, *(() if cpu else kernels_missing(result))]
    return "; ".join(filter(None, faults)) or "ok"


def kernels_missing(result: dict[str, Any]) -> list[str]:
    """What the plugin's own CUDA kernels did not compute."""
    missing = [
        f"rank {number} has not the CUDA kernels of the plugin"
        for number, rank in enumerate(result["loaded"])
        if rank["extension"] is None or set(rank["operators"]) != OPERATORS
    ]
    if "ran" in result:
        missing += [f"{name} did not run" for name in OPERATORS if f"_C_gguf::{name}" not in result["ran"]]
    return missing


def broken(comparison: dict[str, Any], attention: str, routed: bool, bounds: dict[str, Any]) -> list[str]:
    """Bounds that a comparison passes."""
    if "same_tokens" in comparison:
        faults = [f"{name}: {text}" for name, text in comparison["wrong"].items()]
        if not comparison["difference"] <= bounds["greedy"]["difference"]:
            faults.append(f"a log probability is off by {comparison['difference']:.3f}")
        return faults
    faults = []
    for part, found in comparison.items():
        beyond = attention == "sparse" and part != "prompt_within"
        bound = bounds["sparse" if beyond else "routed" if routed else "dense"]
        if not found["divergence"] <= bound["divergence"]:
            faults.append(f"{part}: divergence {found['divergence']:.4f} nats")
        if found["decided"] >= ENOUGH and found["agreement"] < bound["agreement"]:
            faults.append(f"{part}: {found['agreement']:.3f} of the first choices agree")
    return faults


def sites(cases: Iterable[Case], folder: Path, python: str) -> dict[str, Path | str]:
    """The patched stack under the name "", and one for each mutation: its folder, or why it cannot be made."""
    installed = installed_at(python)
    series = patches.load_series(SERIES)
    made: dict[str, Path | str] = {}
    overlay.build(folder / "patched", installed, series)
    made[""] = folder / "patched"
    for case in cases:
        if not case.mutation:
            continue
        out = case.fields.get("take_out")
        kept = tuple(patch for patch in series.patches if out is None or out not in patch.file)
        edits = [overlay.Edit(**case.fields["edit"])] if "edit" in case.fields else []
        try:
            if out is not None and len(kept) == len(series.patches):
                raise ValueError(f"no patch is called {out}; renew the mutation")
            overlay.build(folder / case.name, installed, patches.Series(kept), edits)
            made[case.name] = folder / case.name
        except (patches.PatchError, ValueError) as error:
            made[case.name] = f"{type(error).__name__}: {error}"
    return made


def installed_at(python: str) -> Path:
    """The folder of the stack's distributions, which need not be the interpreter's own."""
    code = "import importlib.util as u; print(u.find_spec('vllm_gguf_plugin').origin)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).parents[1]


def serve(command: Sequence[str], site: Path, asked: dict[str, Any], cards: str | None, log: Path) -> dict[str, Any]:
    """One case in a process group of its own, which is gone afterwards. `command` takes JSON, its last line is JSON."""
    path = [str(site), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": ":".join(filter(None, path)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **asked["environment"],
    }
    if asked["options"]["tensor_parallel_size"] == 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if cards is not None:
        environment["CUDA_VISIBLE_DEVICES"] = cards
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, json.dumps(asked)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = output.strip().splitlines()
    if not lines:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return {"error": f"no answer within {LIMIT} s, exit {process.returncode}: " + "\n".join(tail)}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def cards_here() -> list[dict[str, str]]:
    """Name and driver of every card; none without a driver."""
    fields = "name,driver_version,memory.total"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return [dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows]


def commit() -> str:
    """The commit of this checkout; a copy without its history is told it in OCTOSERVE_COMMIT."""
    if told := os.environ.get("OCTOSERVE_COMMIT"):
        return told
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def prove(
    cases: list[Case],
    document: dict[str, Any],
    arguments: argparse.Namespace,
    cards: int,
    report: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run the cases, first those of one rank, and report each as it ends."""
    made = sites(cases, arguments.out / "sites", arguments.python)
    turn = itertools.count()

    def one(case: Case) -> None:
        site = made[case.name if case.mutation else ""]
        asked = request(case, document["models"][case.fields["model"]], arguments.models, arguments.cpu)
        started = time.monotonic()
        if isinstance(site, str):
            result: dict[str, Any] = {"error": site}
        else:
            numbers = range(cards) if case.ranks > 1 else [next(turn) % max(1, cards)]
            shown = ",".join(map(str, list(numbers)[: case.ranks])) if cards else None
            log = arguments.out / "logs" / f"{case.name}.log"
            result = serve([arguments.python, str(HERE / "loader_serve.py")], site, asked, shown, log)
            said = case.fields.get("says", "")
            if not arguments.cpu and said not in log.read_text(encoding="utf-8", errors="replace"):
                result.setdefault("error", f"{log.name} does not say {said!r}")
        result["seconds"] = round(time.monotonic() - started, 1)
        result["verdict"] = verdict(case, document, asked, result, arguments.cpu)
        report(case.name, result)

    for ranks in sorted({case.ranks for case in cases}):
        with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
            list(pool.map(one, [case for case in cases if case.ranks == ranks]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", default="loader.yml", help="file beside this one: loader, sparse or indexer.yml")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--jobs", type=int, default=4, help="cases beside each other")
    parser.add_argument("--only", help="names of cases, with commas between")
    parser.add_argument("--cpu", action="store_true", help="a dry run on a CPU stack")
    arguments = parser.parse_args()
    (arguments.out / "logs").mkdir(parents=True, exist_ok=True)

    document = load_document(arguments.cases)
    cards = [] if arguments.cpu else cards_here()
    chosen = set(arguments.only.split(",")) if arguments.only else None
    cases = [case for case in load_cases(document) if chosen is None or case.name in chosen]
    if not arguments.cpu:
        cases = [case for case in cases if case.ranks <= len(cards)]
    results: dict[str, Any] = {}
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "covers": COVERS,
        "command": " ".join(["tests/gpu/loader_proof.py", *sys.argv[1:]]),
        "cards": cards,
        **document,
        "results": results,
    }

    def report(name: str, result: dict[str, Any]) -> None:
        record["versions"] = result.pop("versions", record.get("versions"))
        results[name] = result
        print(f"{result['seconds']:6.1f} s  {name}: {result['verdict'][:400]}", flush=True)
        (arguments.out / "loader_proof.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    prove(cases, document, arguments, len(cards), report)
    return 0 if results and all(result["verdict"] == "ok" for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
