"""docs/faults.md says what the committed results say, and every fault of the code is among them."""

from __future__ import annotations

import pytest

from tests import pages
from tests.faults import redeploy, service, table


@pytest.mark.parametrize("name", table.SUITES)
def test_the_page_shows_the_committed_results(name: str) -> None:
    shown = pages.between(name).search(table.PAGE.read_text(encoding="utf-8"))
    assert shown
    assert shown[0] == table.render(table.load(name)), "run python -m tests.faults.table"


@pytest.mark.parametrize("name", table.SUITES)
def test_every_fault_ended_as_it_must(name: str) -> None:
    rows = table.load(name)["faults"]
    assert rows
    assert [row["fault"] for row in rows if not row["ok"]] == []


def test_every_fault_was_met() -> None:
    met = {name: {row["fault"] for row in table.load(name)["faults"]} for name in table.SUITES}
    assert {fault.name for fault in service.FAULTS if fault.engine != "real"} - met["service"] == set()
    assert {fault.name for fault in service.FAULTS if fault.engine != "fake"} - met["vllm"] == set()
    assert {case.name for case in redeploy.CASES} - met["redeploy"] == set()
    assert len(met["vllm"]) >= 3


def test_a_fault_that_did_not_end_so_is_shown() -> None:
    result = {
        "date": "2026-11-30",
        "commit": "0123456789abcdef",
        "faults": [
            {"fault": "a", "ends": "b", "bound_s": 30.0, "ok": True, "seconds": 1.5},
            {"fault": "c", "ends": "d", "bound_s": 30.0, "ok": False, "found": "e"},
            {"fault": "seed 1", "ends": "on", "bound_s": 9.0, "ok": True, "seconds": 3.0, "at": "Task"},
        ],
    }
    text = table.render(result)
    assert "| a | b | 1.5, 30 |" in text
    assert "| c | d | **did not** |" in text
    assert "random task, 1 times, at 1 different tasks | the next run goes on | 1 of 1 did so |" in text
