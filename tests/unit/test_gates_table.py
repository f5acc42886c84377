"""The results of the gate's long suites: the page says what they say, and they speak of today's mutants."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.gates import table

MUTANTS = table.load("mutants")
HEALTHY = table.load("healthy")


def test_the_page_says_what_the_results_say() -> None:
    found = table.MARKED.search(table.PAGE.read_text(encoding="utf-8"))
    assert found and found[0] == table.render(MUTANTS, HEALTHY), "python -m tests.gates.table writes it again"


def test_the_page_names_each_scripted_fault() -> None:
    found = table.SCRIPTED.search(table.PAGE.read_text(encoding="utf-8"))
    assert found and found[0] == table.render_scripted(), "python -m tests.gates.table writes it again"


def test_the_results_speak_of_the_mutants_of_today() -> None:
    mutants = yaml.safe_load((table.HERE / "mutants.yml").read_text(encoding="utf-8"))
    assert set(MUTANTS["mutants"]) | set(MUTANTS["not_asked"]) == set(mutants)
    wrong = {name for name, entry in mutants.items() if not entry.get("control")}
    assert {name for name, row in MUTANTS["mutants"].items() if not row["control"]} <= wrong


@pytest.mark.parametrize("name", [name for name, row in MUTANTS["mutants"].items() if row["outcome"] == "caught"])
def test_a_mutant_is_caught_by_a_judgement(name: str) -> None:
    row: dict[str, Any] = MUTANTS["mutants"][name]
    assert any(row["caught_by"].values()) and all(row["reasons"].values())
    assert row["could_not_run"] == []


def test_what_is_not_caught_has_a_reason() -> None:
    mutants = yaml.safe_load((table.HERE / "mutants.yml").read_text(encoding="utf-8"))
    missed = [name for name, row in MUTANTS["mutants"].items() if row["outcome"] == "missed"]
    assert [name for name in missed if not mutants[name].get("unseen")] == []


def test_no_healthy_run_counts_twice() -> None:
    runs = [(run["model"], run["start"], run["run"]) for run in HEALTHY["runs"]]
    assert len(runs) == len(set(runs))
    assert {model for model, _, _ in runs} == {"tiny_glm", "smollm2"}
