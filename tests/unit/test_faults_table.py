"""docs/faults.md says what the committed results say, and of every fault of the code whether it was met."""

from __future__ import annotations

from typing import Any

import pytest

from tests import pages
from tests.faults import redeploy, suites, table


@pytest.mark.parametrize("name", table.SUITES)
def test_the_page_shows_the_committed_results(name: str) -> None:
    shown = pages.between(name).search(table.PAGE.read_text(encoding="utf-8"))
    assert shown
    assert shown[0] == table.render(name, table.load(name)), "run python -m tests.faults.table"


@pytest.mark.parametrize("name", table.SUITES)
def test_every_fault_ended_as_it_must_and_within_its_bound(name: str) -> None:
    result = table.load(name)
    cases = {case.name: case for case in suites.SUITES[name]}
    met = [(cases[row["fault"]], row) for row in result["faults"] if row["fault"] in cases] + table.kills(result)
    assert met
    assert [row for case, row in met if not table.is_good(case, row)] == []


def test_names_tell_cases_apart() -> None:
    for cases in suites.SUITES.values():
        assert len({case.name for case in cases}) == len(cases)
    assert len(suites.SUITES["service"]) + len(suites.SUITES["redeploy"]) >= 25
    assert len(suites.SUITES["vllm"]) >= 3


def test_the_kills_at_random_tasks_are_all_there_or_none() -> None:
    """The page says so where the result holds none."""
    made = len(table.kills(table.load("redeploy")))
    assert made == 0 or made >= table.KILLS, f"the run with --random {table.KILLS} did not come to its end"


CASE = suites.SUITES["service"][0]


def row(**changes: Any) -> dict[str, Any]:
    return {"fault": CASE.name, "case": suites.digest(CASE), "ok": True, "seconds": 1.5, **changes}


@pytest.mark.parametrize(
    ("met", "told"),
    [
        (row(), f"1.5, {CASE.bound_s:.0f}"),
        (row(seconds=CASE.bound_s), f"{CASE.bound_s}, {CASE.bound_s:.0f}"),
        (row(seconds=CASE.bound_s + 0.1), "**did not**"),
        ({"fault": CASE.name, "case": suites.digest(CASE), "ok": False, "found": "e"}, "**did not**"),
        (row(case="0123456789ab"), "not met since it was changed"),
        (None, "not met yet"),
    ],
)
def test_a_row_tells_how_its_case_ended(met: dict[str, Any] | None, told: str) -> None:
    text = table.render("service", {"date": "2026-11-30", "commit": "0123", "faults": [met] if met else []})
    assert f"| {CASE.name} | {CASE.ends} | {told} |" in text


def kill(seed: int, **changes: Any) -> dict[str, Any]:
    case = redeploy.at_random(seed)
    found = {"fault": case.name, "case": suites.digest(case), "ok": True, "seconds": 3.0, "at": f"Task {seed % 2}"}
    return {**found, **changes}


def test_random_kills_are_counted() -> None:
    made = [kill(1), kill(2), kill(3, ok=False), kill(4, seconds=1e4), kill(5, case="of another code")]
    text = table.render("redeploy", {"date": "2026-11-30", "commit": "0123", "faults": made})
    assert "random task, 4 times, at 2 different tasks | the next run goes on | 2 of 4 did so" in text


def test_a_result_without_random_kills_says_so() -> None:
    text = table.render("redeploy", {"date": "2026-11-30", "commit": "0123", "faults": []})
    assert "random task, 50 times | the next run goes on | not in this result" in text
