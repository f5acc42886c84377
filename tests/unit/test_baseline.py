"""The baseline: one rate a start, and a test with the error rates that it states."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from octoserve import baseline, chi_squared, student_t
from octoserve.baseline import Start

RUNS = 6000


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.975, 100, 1.984),
        (0.99, 2, 6.965),
        (0.99, 3, 4.541),
        (0.95, 7, 1.895),
    ],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: int, table: float) -> None:
    assert student_t.quantile(probability, freedom) == pytest.approx(table, abs=6e-4)


def test_summary_of_a_sample() -> None:
    found = student_t.summarize([10.0, 12.0, 14.0])
    assert (found["mean"], found["stdev"], found["n"]) == (12.0, 2.0, 3)
    assert found["ci95"] == pytest.approx([12 - 4.303 * 2 / 3**0.5, 12 + 4.303 * 2 / 3**0.5], abs=1e-2)
    assert student_t.summarize([10.0]) == {"mean": 10.0, "stdev": None, "ci95": None, "n": 1}


def starts(*means: float) -> list[Start]:
    return [Start(f"s{n}", "2026-01-01T00:00:00+00:00", f"{n:04}", mean, 5) for n, mean in enumerate(means)]


def test_before_three_starts_only_the_floor_counts() -> None:
    for history in (starts(), starts(57.0), starts(57.0, 57.1)):
        found = baseline.compare(history, "now", 30.0)
        assert not found["regression"]
        assert found["alarm_below"] is None
        assert found["starts"] == len(history)


def test_after_three_starts_a_slowdown_is_seen_and_its_smallest_size_told() -> None:
    history = starts(57.0, 57.2, 56.8, 57.1)
    healthy, slow = (baseline.compare(history, "now", mean) for mean in (56.9, 54.9))
    assert not healthy["regression"]
    assert slow["regression"]
    edge = healthy["mean"] * (1 - healthy["smallest_slowdown"])
    assert edge == pytest.approx(healthy["alarm_below"])
    assert baseline.compare(history, "now", edge - 1e-6)["regression"]
    assert not baseline.compare(history, "now", edge + 1e-6)["regression"]


def test_a_start_is_not_compared_with_itself() -> None:
    assert baseline.compare(starts(57.0, 57.0, 57.0), "s1", 57.0)["starts"] == 2


def test_history_grows_by_one_mean_a_start(tmp_path: Path) -> None:
    path = tmp_path / "baselines" / "tiny__vllm.json"
    for start in starts(50.0, 52.0):
        baseline.append(path, start)
    assert [start.mean for start in baseline.load(path)] == [50.0, 52.0]
    again = baseline.append(path, Start("s1", "2026-01-02T00:00:00+00:00", "0001", 56.0, 15))
    assert [start.mean for start in again] == [50.0, 55.0]
    assert again == baseline.load(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"starts": [{"mean": 1}]}', '{"starts": 3}'])
def test_a_damaged_history_is_an_error_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="move the file away"):
        baseline.append(path, starts(1.0)[0])
    assert path.read_text() == text


def test_a_failed_write_leaves_the_old_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.json"
    baseline.append(path, starts(50.0)[0])

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        baseline.append(path, starts(1.0, 2.0)[1])
    assert [start.mean for start in baseline.load(path)] == [50.0]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("value", "freedom", "table"),
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.4
    [
        (3.841, 1, 0.05),
        (9.210, 2, 0.01),
        (11.345, 3, 0.01),
        (16.919, 9, 0.05),
        (29.588, 10, 0.001),
        (124.342, 100, 0.05),
    ],
)
def test_tails_are_those_of_the_tables(value: float, freedom: int, table: float) -> None:
    assert chi_squared.exceeds(value, freedom) == pytest.approx(table, rel=2e-3)


def test_the_alarm_is_where_the_formula_puts_it() -> None:
    """Three starts with sd 0.2, moderated by 30 starts with sd 0.57 (1 % of 57)."""
    found = baseline.compare(starts(57.0, 57.2, 56.8), "now", 57.0)
    stdev = ((2 * 0.2**2 + 30 * 0.57**2) / 32) ** 0.5
    assert found["stdev"] == pytest.approx(0.2)
    assert found["alarm_below"] == pytest.approx(57.0 - 2.5180 * stdev * (4 / 3) ** 0.5, abs=1e-4)
    assert found["detectable_slowdown"] == pytest.approx((2.5180 + 1.6449) * stdev * (4 / 3) ** 0.5 / 57, abs=1e-6)
    assert not found["wider"]


def test_what_the_trials_leave_open_widens_the_margin() -> None:
    sure, unsure = (
        baseline.compare([Start(f"s{n}", "", "", 57.0 + n / 10, 20, stderr) for n in range(4)], "now", 57.0)
        for stderr in (0.1, 2.0)
    )
    assert unsure["smallest_slowdown"] > 3 * sure["smallest_slowdown"]


def test_a_history_that_is_wider_than_assumed_stands_alone() -> None:
    found = baseline.compare(starts(50.0, 57.0, 64.0, 57.0), "now", 40.0)
    assert found["wider"]
    assert found["alarm_below"] == pytest.approx(57.0 - 4.8215 * found["stdev"] * (5 / 4) ** 0.5, abs=1e-3)
    assert not found["regression"]


@pytest.mark.parametrize("earlier", [3, 5, 10])
def test_the_stated_error_rates_hold(earlier: int) -> None:
    """Healthy starts raise an alarm at most once in a hundred; 5 % slower ones in at least 95 of them."""
    chosen = random.Random(20261130 + earlier)
    within = 0.003  # what 20 trials of 100 tokens with a CV of 10 % leave

    def start(n: int, rate: float = 57.0) -> Start:
        mean = rate * chosen.gauss(1, 0.01) * chosen.gauss(1, within)
        return Start(f"s{n}", "", "", mean, 20, within * rate)

    false_alarms = caught = 0
    for _ in range(RUNS):
        history = [start(n) for n in range(earlier)]
        false_alarms += baseline.compare(history, "now", start(0).mean)["regression"]
        caught += baseline.compare(history, "now", start(0, 57.0 * 0.95).mean)["regression"]
    three_deviations = 3 * (0.01 * 0.99 / RUNS) ** 0.5
    assert false_alarms / RUNS < baseline.ALPHA + three_deviations
    assert caught / RUNS > 0.95 - 3 * (0.05 * 0.95 / RUNS) ** 0.5


def test_false_alarms_keep_their_rate_on_a_host_that_varies_more_once_its_history_shows_it() -> None:
    chosen = random.Random(7)
    alarms = 0
    for _ in range(RUNS // 2):
        history = starts(*(chosen.gauss(57, 0.03 * 57) for _ in range(20)))
        alarms += baseline.compare(history, "now", chosen.gauss(57, 0.03 * 57))["regression"]
    assert alarms / (RUNS // 2) < 0.02


def test_a_slowdown_that_raised_the_alarm_is_kept_and_not_compared_with(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    for start in starts(57.0, 57.2, 56.8):
        baseline.append(path, start)
    history = baseline.append(path, Start("slow", "", "0004", 50.0, 20, 0.1, regression=True))
    assert [start.mean for start in history] == [57.0, 57.2, 56.8, 50.0]
    found = baseline.compare(baseline.load(path), "now", 50.0)
    assert (found["starts"], found["regression"]) == (3, True)


def test_a_history_of_before_is_read(tmp_path: Path) -> None:
    """Files written before standard errors were kept have none."""
    path = tmp_path / "b.json"
    old = {"start": "a", "time": "t", "deployment": "0001", "mean": 57.0, "trials": 5}
    path.write_text(json.dumps({"unit": "decode tok/s", "starts": [old]}))
    (start,) = baseline.append(path, Start("a", "u", "0001", 59.0, 5, 0.2))
    assert (start.mean, start.stderr, start.regression) == (58.0, None, False)


def test_two_measurements_of_a_start_are_one_with_both_their_trials(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    baseline.append(path, Start("a", "t", "", 56.0, 10, 0.3))
    (start,) = baseline.append(path, Start("a", "u", "", 58.0, 10, 0.4))
    assert (start.mean, start.trials) == (57.0, 20)
    assert start.stderr == pytest.approx(0.25)


def test_a_start_that_regressed_once_stays_out_whatever_it_measures_later(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    for regression, mean in ((True, 45.0), (False, 57.0)):
        history = baseline.append(path, Start("s1", "2026-01-01T00:00:00+00:00", "0001", mean, 20, 0.1, regression))
    assert [start.regression for start in history] == [True]
    assert baseline.compare(history, "s2", 57.0)["starts"] == 0
