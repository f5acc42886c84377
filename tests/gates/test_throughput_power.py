"""The short part of throughput_power.py: real starts of a noisy server, judged by the gate, and the generator's reach.

A minute, most of it waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from octoserve import load, trial
from octoserve.baseline import Start
from octoserve.openai_api import Client

from tests.gates import noisy_server, throughput_power
from tests.gates.noisy_server import EXACT
from tests.gates.throughput_power import as_starts, gates_test, measure_starts, starts_of

EARLIER, TODAY = 20, 6
HEALTHY = starts_of(EARLIER) + starts_of(TODAY)
SLOW = starts_of(TODAY, 0.05)


@pytest.fixture(scope="module")
def starts() -> tuple[list[Start], list[Start]]:
    """Healthy starts of one host and slow ones, measured side by side with the gate's own code."""
    found = measure_starts([*HEALTHY, *SLOW], len(HEALTHY) + len(SLOW))
    assert not any(one["generator"]["bottleneck"] for one in found)
    return as_starts(found[: len(HEALTHY)], "steady", "healthy"), as_starts(found[len(HEALTHY) :], "steady", "slow")


def alarms(history: Sequence[Start], todays: Sequence[Start]) -> int:
    return sum(gates_test(history, today) for today in todays)


@pytest.mark.parametrize("earlier", throughput_power.EARLIER)
def test_slow_starts_are_caught_and_healthy_ones_are_not(starts: tuple[list[Start], list[Start]], earlier: int) -> None:
    """How the starts differ is fixed, so only the tokens' noise is left to chance."""
    healthy, slow = starts
    history = healthy[:earlier]
    assert alarms(history, healthy[EARLIER:]) <= 1
    assert alarms(history, slow) >= TODAY - 1


def test_stalls_and_token_times_do_not_move_a_start(starts: tuple[list[Start], list[Start]]) -> None:
    """What is measured is the rate that the server was told, to well under the 1 % that starts differ by."""
    healthy, _ = starts
    errors = [start.mean / noise.rate for start, noise in zip(healthy, HEALTHY)]
    assert statistics.fmean(errors) == pytest.approx(1, abs=0.01)
    assert statistics.stdev(errors) < 0.006


def test_the_generator_reads_64_streams_as_they_come() -> None:
    with noisy_server.serve() as url:
        done = load.run(Client(url, EXACT.name), [load.Prompt("go", 200)] * 64, 64)
    rates = [trial.measure(answer.chunks, bursts=True).decode_tok_s for answer in done.answers]
    assert statistics.median(rates) == pytest.approx(57, rel=0.02)
    assert done.cost.events / done.cost.seconds > 2500
    assert not done.cost.bottleneck
