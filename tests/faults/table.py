"""The tables of docs/faults.md: what the committed results of the faults say.

    python -m tests.faults.table

Writes them between their markers; tests/unit/test_faults_table.py keeps them equal to the results.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import pages

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/faults.md"
SUITES = ("service", "vllm", "redeploy")


def load(name: str) -> dict[str, Any]:
    """The committed result of a suite."""
    return pages.load(HERE / f"{name}.json")


def render(result: Mapping[str, Any]) -> str:
    """A table of one suite."""
    rows = [row for row in result["faults"] if "at" not in row]
    random = [row for row in result["faults"] if "at" in row]
    lines = ["| fault | must end so | seconds, at most |", "|---|---|---|"]
    for row in rows:
        ended = f"{row['seconds']}, {row['bound_s']:.0f}" if row["ok"] else "**did not**"
        lines.append(f"| {row['fault']} | {row['ends']} | {ended} |")
    if random:
        good = [row for row in random if row["ok"]]
        where = len({row["at"] for row in good})
        name = f"the controller dies at a random task, {len(random)} times, at {where} different tasks"
        lines.append(f"| {name} | the next run goes on | {len(good)} of {len(random)} did so |")
    return "\n".join([*lines, "", f"({result['date']}, commit {result['commit'][:10]}.)"]) + "\n"


def main() -> int:
    """Write the tables."""
    pages.fill(PAGE, {name: render(load(name)) for name in SUITES})
    return 0


if __name__ == "__main__":
    sys.exit(main())
