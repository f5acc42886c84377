"""The tables of docs/faults.md: of each case of the code, what the committed results say.

    python -m tests.faults.table

Writes them between their markers; tests/unit/test_faults_table.py keeps them equal to the results.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import pages
from tests.faults import redeploy, suites

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/faults.md"
SUITES = ("service", "vllm", "redeploy")
KILLS = 50


def load(name: str) -> dict[str, Any]:
    """The committed result of a suite."""
    return pages.load(HERE / f"{name}.json")


def is_good(case: suites.Case, row: Mapping[str, Any]) -> bool:
    """Whether it ended as it must, within the bound that holds today."""
    return bool(row["ok"]) and row["seconds"] <= case.bound_s


def ended(case: suites.Case, row: Mapping[str, Any] | None) -> str:
    """How a case ended, or why that is not known."""
    if row is None:
        return "not met yet"
    if row.get("case") != suites.digest(case):
        return "not met since it was changed"
    return f"{row['seconds']}, {case.bound_s:.0f}" if is_good(case, row) else "**did not**"


def kills(result: Mapping[str, Any]) -> list[tuple[suites.Case, dict[str, Any]]]:
    """The kills of the controller at random tasks that a result holds, as they are made today."""
    found = [(redeploy.at_random(int(row["fault"].split()[-1])), row) for row in result["faults"] if "at" in row]
    return [(case, row) for case, row in found if row.get("case") == suites.digest(case)]


def render(name: str, result: Mapping[str, Any]) -> str:
    """A table of one suite."""
    rows = {row["fault"]: row for row in result["faults"]}
    lines = ["| fault | must end so | seconds, at most |", "|---|---|---|"]
    for case in suites.SUITES[name]:
        lines.append(f"| {case.name} | {case.ends} | {ended(case, rows.get(case.name))} |")
    if name == "redeploy":
        lines.append(_kills(kills(result)))
    return "\n".join([*lines, "", f"({result['date']}, commit {result['commit'][:10]}.)"]) + "\n"


def _kills(made: list[tuple[suites.Case, dict[str, Any]]]) -> str:
    good = [row for case, row in made if is_good(case, row)]
    where = f"{len(made)} times, at {len({row['at'] for _, row in made})} different tasks"
    told = f"{len(good)} of {len(made)} did so, each within {redeploy.at_random(0).bound_s:.0f} s"
    if not made:
        where, told = f"{KILLS} times", f"not in this result: only a run with `--random {KILLS}` makes them"
    return f"| the controller dies at a random task, {where} | {redeploy.NEXT} | {told} |"


def main() -> int:
    """Write the tables."""
    pages.fill(PAGE, {name: render(name, load(name)) for name in SUITES})
    return 0


if __name__ == "__main__":
    sys.exit(main())
