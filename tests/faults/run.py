"""Meet faults on a host of the sandbox, and write down how each ended.

    PYTHONPATH=module_utils python -m tests.faults.run service  --host molecule-service=127.0.0.5
    PYTHONPATH=module_utils python -m tests.faults.run redeploy --host molecule-redeploy=127.0.0.6 [--all] [--random 50]

`service --engine real --model NAME` leaves out what needs the fake engine; `daily` is no fault, but the commands of
daily work, the last of which removes the service. `--only TEXT` chooses by name. Ends 1 where one did not end as it
must, or took longer than its bound.

`--save FILE` writes the result; of a part (`--only`, or redeploys without `--all` and `--random`) its rows of the file.
What ended as it must is kept in .cache/faults as well, so that the same command goes on where it was interrupted, as
long as neither the case nor the code that it meets has changed; remove the folder to begin anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octoserve import atomic

from tests import pages, results
from tests.faults import redeploy, suites
from tests.faults.host import ROOT, FaultError, Host

KEPT = ROOT / ".cache/faults"


def chosen(suite: str, options: argparse.Namespace) -> Iterator[suites.Case]:
    """The cases that are to be met."""
    cases = [
        case for case in suites.SUITES[suite] if suite != "redeploy" or options.all or getattr(case, "short", True)
    ]
    for case in [*cases, *(redeploy.at_random(seed) for seed in range(options.random))]:
        if options.only in case.name:
            yield case


def outcome(case: suites.Case, meet: Callable[[], Any]) -> dict[str, Any]:
    """Meet a case, and tell how it ended: `ok` if as it must and within its bound, else also what was `found`."""
    began = time.monotonic()
    try:
        told = meet()
    except (FaultError, subprocess.SubprocessError) as error:  # the others still tell something
        return {"ok": False, "found": str(error)}
    seconds = round(told if isinstance(told, float) else time.monotonic() - began, 1)
    row: dict[str, Any] = {"ok": seconds <= case.bound_s, "seconds": seconds}
    if isinstance(told, str):
        row["at"] = told
    return row if row["ok"] else {**row, "found": f"as it must, but after {seconds} s, wanted {case.bound_s:.0f}"}


def kept_in(suite: str, case: suites.Case, covered: str) -> Path:
    """Where a row is kept that was met with this case and this code."""
    name = hashlib.sha256("\0".join([suite, case.name, suites.digest(case), covered]).encode()).hexdigest()
    return KEPT / f"{name[:24]}.json"


def save(path: Path, made_by: dict[str, Any], rows: list[dict[str, Any]], *, whole: bool) -> None:
    """Write a result. Of a part: into the file of the whole, whose commit stays, each row with its own."""
    if not whole and path.exists():
        before = pages.load(path)
        met = {row["fault"]: row for row in rows}
        rows = [met.pop(row["fault"], row) for row in before.pop("faults")]
        made_by, rows = before, [*rows, *met.values()]
    results.save(path, made_by, {"faults": rows})


def main() -> int:
    """Exit status 1 where a fault did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["service", "redeploy", "daily"])
    parser.add_argument("--host", required=True, help="NAME=ADDRESS of the sandbox host")
    parser.add_argument("--model", default="fake", help="name under which it serves")
    parser.add_argument("--engine", choices=["fake", "real"], default="fake", help="which one serves there")
    parser.add_argument("--all", action="store_true", help="redeploy: also what takes long")
    parser.add_argument(
        "--random", type=int, default=0, help="redeploy: so many kills of the controller at random tasks"
    )
    parser.add_argument("--only", default="", help="faults whose name holds this text")
    parser.add_argument("--save", type=Path, help="file for the result")
    options = parser.parse_args()
    name, address = options.host.split("=", 1)
    host = Host(name, address, options.model)
    suite = "vllm" if options.engine == "real" else options.suite
    made_by, covered = results.origin(suites.COVERS), results.digest(suites.COVERS)
    rows: list[dict[str, Any]] = []
    for case in chosen(suite, options):
        kept = kept_in(suite, case, covered)
        if options.save and kept.exists():
            rows.append(json.loads(kept.read_text()))
            print(f"ok before: {case.name}", flush=True)
            continue
        found = outcome(case, lambda case=case: suites.meet(host, case))  # type: ignore[misc]
        told = {"fault": case.name, "case": suites.digest(case), "commit": made_by["commit"][:10]}
        rows.append({**told, **found})
        if found["ok"]:
            print(f"ok: {case.name}: {case.ends} ({found['seconds']} s)", flush=True)
        else:
            print(f"WRONG: {case.name}: wanted: {case.ends}; found: {found['found']}", flush=True)
            host.fresh()
        if options.save and found["ok"]:
            KEPT.mkdir(parents=True, exist_ok=True)
            atomic.write_text(kept, json.dumps(rows[-1]) + "\n")
    if options.save:
        all_of_it = options.suite != "redeploy" or (options.all and options.random > 0)
        save(options.save, made_by, rows, whole=all_of_it and not options.only)
    wrong = sum(not row["ok"] for row in rows)
    print(f"{len(rows)} faults, {wrong} did not end as they must", flush=True)
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
