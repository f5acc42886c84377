"""The coherence gate on real vLLM on the CPU: a healthy server passes, three broken ones do not.

The short part of the proof; every mutant: power.py, no false alarm: healthy.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.gates import power
from tests.gates.deployments import Workshop, load_mutants

SHORT = {name: replace(mutant, repeat=1) for name, mutant in load_mutants().items() if mutant.short}


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with Workshop() as made:
        yield made


@pytest.mark.parametrize("name", [name for name, mutant in SHORT.items() if mutant.control])
def test_a_healthy_server_passes(workshop: Workshop, name: str) -> None:
    result = power.ask(workshop, SHORT[name])
    assert result["outcome"] == power.PASSED, result


@pytest.mark.parametrize("name", [name for name, mutant in SHORT.items() if not mutant.control])
def test_a_mutant_is_caught_by_a_judgement(workshop: Workshop, name: str) -> None:
    result = power.ask(workshop, SHORT[name])
    assert result["outcome"] == power.CAUGHT, result
    assert result["could_not_run"] == []


def test_the_short_part_has_a_control_and_three_kinds_of_mutants() -> None:
    mutants = [mutant for mutant in SHORT.values() if not mutant.control]
    assert len(SHORT) - len(mutants) == 1
    assert len({mutant.group for mutant in mutants}) == len(mutants) == 3
