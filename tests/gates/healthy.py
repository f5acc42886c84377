#!/usr/bin/env python3
"""Ask the coherence gate about healthy servers again and again: part of `make test-gates`.

    PYTHONPATH=module_utils:tests/patches python -m tests.gates.healthy [--model NAME] [--runs N] [--collect]

A long suite: 50 runs for each of two models on real vLLM on the CPU. Several starts with other settings, in each of
them runs with other orders, concurrency and background load. Each run is kept in .cache/gates at once, so that an
interrupted suite goes on where it was. A server that dies is no longer healthy: its start is told and not counted.
Writes tests/gates/healthy.json with the commit, and of each run what came closest to its bound. Ends 0 only where no
run raised an alarm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octoserve import atomic, coherence, scoring

from tests import results
from tests.gates import deployments, power, serving
from tests.gates.deployments import HERE, Mutant, Workshop
from tests.gates.serving import WORK

RESULT = HERE / "healthy.json"
RUNS = 10  # of each start
CONCURRENCY = (4, 1, 8, 2, 16, 3, 7, 5)
BACKGROUND = (3, 0, 0, 6)
DIFFERENCES = ("drift", "again", "under_load", "against_prefill")


@dataclass(frozen=True)
class Start:
    """A healthy server: further options beside those that the model is served with."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


STARTS: dict[str, tuple[Start, ...]] = {
    "tiny_glm": (
        Start("as the profile says"),
        Start("two requests at once", {"max-num-seqs": 2, "seed": 11}),
        Start("preempted", {"num-gpu-blocks-override": 37, "max-model-len": 560, "max-num-seqs": 16, "seed": 12}),
        Start("compiled", {"enforce-eager": False, "seed": 13}),
        Start("started again", {"max-num-seqs": 5, "seed": 14}),
    ),
    "smollm2": (
        Start("as it is served"),
        Start("no prefix caching", {"enable-prefix-caching": False, "seed": 21}),
        Start("small blocks, chunked prefill", {"block-size": 32, "max-num-batched-tokens": 128, "seed": 22}),
        Start("compiled", {"enforce-eager": False, "seed": 23}),
        Start("float32", {"dtype": "float32", "seed": 24}),
    ),
}


def margins(result: Mapping[str, Any]) -> dict[str, float]:
    """The largest share of its bound or limit that each kind of measurement reached; 1 and more would be a failure."""
    found: dict[str, float] = {}
    for measured in (case["measured"] for case in result["cases"] if case["measured"]):
        for name in DIFFERENCES:
            if measured.get(name):
                bound = measured["drift_bound" if name == "drift" else "bound"]
                # Of few tokens the mean does not count; see scoring.py.
                kinds = ("mean", "max") if measured["tokens"] >= scoring.MEAN_TOKENS else ("max",)
                share = max(measured[name][kind] / bound[kind] for kind in kinds)
                found[name] = max(found.get(name, 0.0), share)
    return {name: float(f"{share:.3g}") for name, share in found.items()}


def largest(result: Mapping[str, Any]) -> dict[str, float]:
    """The largest absolute differences of log probabilities (nats) and the perplexities, as measured."""
    found: dict[str, float] = {}
    for case in result["cases"]:
        for name, value in (case["measured"] or {}).items():
            if name in DIFFERENCES and value:
                found[name] = max(found.get(name, 0.0), float(f"{value['max']:.3g}"))
            elif name == "perplexity":
                found[f"perplexity of {case['name']}"] = round(value, 5)
    return found


def run(url: str, model: deployments.Served, how: Mapping[str, int]) -> dict[str, Any]:
    """One run of the gate."""
    client = deployments.client(url, model)
    settings = deployments.settings(model, order_seed=how["order_seed"], concurrency=how["concurrency"])
    with deployments.Traffic(client, how["background"]) as traffic:
        result = coherence.run(client, model.suites, settings)
    return {
        **how,
        "ok": result["ok"],
        "passed": result["passed"],
        "total": result["total"],
        "seconds": result["seconds"],
        "background_answers": traffic.answers,
        "margins": margins(result),
        "largest": largest(result),
        "not_passed": {
            case["name"]: {key: case[key] for key in ("verdict", "reason", "answer")}
            for case in result["cases"]
            if case["verdict"] != coherence.PASSED
        },
    }


def plan(model: str, start: Start, number: int) -> dict[str, int]:
    """How one run is asked."""
    chance = random.Random(f"{model} {start.name} {number}")
    return {
        "order_seed": chance.randint(1, 10**6),
        "concurrency": CONCURRENCY[number % len(CONCURRENCY)],
        "background": BACKGROUND[number % len(BACKGROUND)],
    }


def kept(model: str, start: Start, number: int) -> Path:
    """Where a run's result lies, named after all that it depends on."""
    parts = [model, start.name, json.dumps(start.options), str(number), power.JUDGED_BY, *power.texts(model)]
    return WORK / "healthy" / f"{hashlib.sha256(''.join(parts).encode()).hexdigest()[:24]}.json"


def runs_of(workshop: Workshop, model: str, start: Start, number: int, *, collect: bool) -> list[dict[str, Any]]:
    """Every run of one start; asks those that are not kept, unless they are only to be collected."""
    paths = [kept(model, start, index) for index in range(number)]
    missing = [index for index, path in enumerate(paths) if not path.exists()]
    if missing and not collect:
        served = deployments.served(model)
        began = time.monotonic()
        with workshop.deployed(Mutant(start.name, "control", model), start.options) as url:
            print(f"{model}, {start.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
            for index in missing:
                content = {"model": model, "start": start.name, "run": index, "options": dict(start.options)}
                content["gate"] = power.JUDGED_BY[:12]
                content |= run(url, served, plan(model, start, index))
                if not serving.alive(url):
                    raise serving.ServerError(f"the server died in run {index}: {serving.tail(serving.log_file())}")
                paths[index].parent.mkdir(parents=True, exist_ok=True)
                atomic.write_text(paths[index], json.dumps(content))
                found = {key: content[key] for key in ("concurrency", "background", "ok", "seconds", "margins")}
                print(f"{model}, {start.name}, run {index}: {json.dumps(found)}", flush=True)
                if content["not_passed"]:
                    print(json.dumps(content["not_passed"]), flush=True)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def main() -> int:
    """Exit status 1 where a run raised an alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(STARTS), help="only this one; writes no result")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs of each start; other than 10 writes no result")
    parser.add_argument("--collect", action="store_true", help="ask nothing: write down what is kept")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, power.end)
    made_by = power.origin()
    rows: list[dict[str, Any]] = []
    lost: list[str] = []
    with Workshop() as workshop:
        for number in range(max(map(len, STARTS.values()))):
            for model, starts in STARTS.items():
                if arguments.model in (None, model) and number < len(starts):
                    try:
                        how = {"collect": arguments.collect}
                        rows += runs_of(workshop, model, starts[number], arguments.runs, **how)
                    except serving.ServerError as error:
                        lost.append(f"{model}, {starts[number].name}: {error}")
                        print(lost[-1], flush=True)
    if arguments.model is None and arguments.runs == RUNS and not lost:
        results.save(RESULT, made_by, {"runs": rows})
    alarms = [f"{row['model']}, {row['start']}, run {row['run']}" for row in rows if not row["ok"]]
    print(f"{len(rows)} runs, {len(alarms)} alarms: {alarms}; {len(lost)} starts failed", flush=True)
    return 1 if alarms or lost else 0


if __name__ == "__main__":
    sys.exit(main())
