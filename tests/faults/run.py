"""Meet faults on a host of the sandbox, and write down how each ended.

    PYTHONPATH=module_utils python -m tests.faults.run service  --host molecule-service=127.0.0.5
    PYTHONPATH=module_utils python -m tests.faults.run redeploy --host molecule-redeploy=127.0.0.6 [--all] [--random 50]

`service --engine real --model NAME` leaves out what needs the fake engine. `--only TEXT` chooses by name. Ends 1 where
one did not end as it must. `--save FILE` with `--only` replaces rows of the file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import pages, results
from tests.faults import redeploy, service
from tests.faults.host import FaultError, Host

COVERS = ["templates", "roles/vllm_service", "playbooks", "tests/faults", "tests/fixtures/fake_engine"] + [
    f"module_utils/octoserve/{name}.py"
    for name in (
        *("deployment", "guard_deployment", "guard_gpu", "guard_shm", "lock", "nvml", "reclaim", "startup"),
        *("watchdog", "xid"),
    )
]
Step = tuple[str, str, float, Callable[[], Any]]


def service_faults(host: Host, options: argparse.Namespace) -> Iterator[Step]:
    """Name, how it must end, bound in seconds, and what meets it."""
    for fault in service.FAULTS:
        if fault.engine in ("any", options.engine):
            yield fault.name, fault.ends, fault.bound_s, lambda fault=fault: service.meet(host, fault)  # type: ignore[misc]


def redeploy_faults(host: Host, options: argparse.Namespace) -> Iterator[Step]:
    """The same of redeploys."""
    for case in redeploy.CASES:
        if case.short or options.all:
            yield case.name, case.ends, redeploy.TIMEOUT_S, lambda case=case: redeploy.meet(host, case)  # type: ignore[misc]
    for seed in range(options.random):
        name = f"the controller dies at a random task, seed {seed}"
        yield name, "the next run goes on", redeploy.TIMEOUT_S, lambda seed=seed: redeploy.killed_at_random(host, seed)  # type: ignore[misc]


def save(path: Path, made_by: dict[str, Any], rows: list[dict[str, Any]], names: set[str], *, whole: bool) -> None:
    """Write a result. Of a part: into the file of the whole, whose commit stays, each row with its own."""
    if not whole and path.exists():
        before = pages.load(path)
        met = {row["fault"]: row for row in rows}
        kept = [met.pop(row["fault"], row) for row in before["faults"] if row["fault"] in names]
        made_by, rows = {key: before[key] for key in made_by if key in before}, [*kept, *met.values()]
    results.save(path, made_by, {"faults": rows})


def main() -> int:
    """Exit status 1 where a fault did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["service", "redeploy"])
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
    made_by = results.origin(COVERS)
    all_steps = list((service_faults if options.suite == "service" else redeploy_faults)(host, options))
    rows: list[dict[str, Any]] = []
    for name, ends, bound_s, meet in all_steps:
        if options.only not in name:
            continue
        row: dict[str, Any] = {"commit": made_by["commit"][:10], "fault": name, "ends": ends, "bound_s": bound_s}
        began = time.monotonic()
        try:
            told = meet()
            row.update(ok=True, seconds=round(told if isinstance(told, float) else time.monotonic() - began, 1))
            row.update({"at": told} if isinstance(told, str) else {})
            print(f"ok: {name}: {ends} ({row['seconds']} s)", flush=True)
        except (FaultError, subprocess.SubprocessError) as error:  # the others still tell something
            row.update(ok=False, found=str(error))
            print(f"WRONG: {name}: wanted: {ends}; found: {error}", flush=True)
            host.fresh()
        rows.append(row)
    if options.save:
        save(options.save, made_by, rows, {name for name, *_ in all_steps}, whole=not options.only)
    wrong = sum(not row["ok"] for row in rows)
    print(f"{len(rows)} faults, {wrong} did not end as they must", flush=True)
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
