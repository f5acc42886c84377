"""The watchdog restarts what hangs, and only that: busy, loading and stopped services are left alone."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from octoserve import deployment, startup, watchdog
from octoserve.openai_api import Client
from octoserve.startup import UnitState
from octoserve.watchdog import BUSY, HALT, LOADING, NOT_RUNNING, RESTART, SUSPECT, Limits, Memory, Seen, halted, judge

LIMITS = Limits(failures=3, start_timeout_s=600, settled_s=900)
RUNS = UnitState("active", "running", "success", "0", "start-1", 0)
STILL = {"vllm:prompt_tokens_total": 10.0, "vllm:kv_cache_usage_perc": 0.5}


def seen(**changes: Any) -> Seen:
    """A look at a server that has run for an hour and does not answer."""
    return replace(Seen(1e9, RUNS, 3600.0, answered=False, refusal="timed out", counters=STILL), **changes)


@pytest.fixture
def healthy() -> Memory:
    """After an answer."""
    return judge(Memory(), seen(answered=True), LIMITS)


def test_a_hang_is_restarted_after_some_failures_in_a_row(healthy: Memory) -> None:
    verdicts = []
    memory = healthy
    for _ in range(3):
        memory = judge(memory, seen(), LIMITS)
        verdicts.append(memory.verdict)
    assert verdicts == [SUSPECT, SUSPECT, RESTART]
    assert "3 times in a row" in memory.reason


def test_an_answer_forgets_failures(healthy: Memory) -> None:
    memory = judge(judge(healthy, seen(), LIMITS), seen(), LIMITS)
    memory = judge(memory, seen(answered=True), LIMITS)
    assert judge(memory, seen(), LIMITS).verdict == SUSPECT


@pytest.mark.parametrize("name", sorted(STILL))
def test_a_server_whose_counters_move_is_busy(healthy: Memory, name: str) -> None:
    memory = judge(judge(healthy, seen(), LIMITS), seen(), LIMITS)
    for step in range(1, 9):
        memory = judge(memory, seen(counters={**STILL, name: 100.0 + step}), LIMITS)
        assert memory.verdict == BUSY
    assert judge(memory, seen(counters=memory.counters), LIMITS).verdict == SUSPECT, "it counts anew"


def test_a_server_that_shows_no_counters_gets_more_patience(healthy: Memory) -> None:
    memory, verdicts = healthy, []
    for _ in range(9):
        memory = judge(memory, seen(counters=None), LIMITS)
        verdicts.append(memory.verdict)
    assert verdicts == [SUSPECT] * 8 + [RESTART]
    assert "it shows no counters" in memory.reason


def test_a_start_has_its_time_and_no_more() -> None:
    loading = judge(Memory(), seen(age=599.0), LIMITS)
    assert loading.verdict == LOADING
    assert judge(loading, seen(age=601.0), LIMITS).verdict == RESTART


def test_a_clock_that_is_set_does_not_matter() -> None:
    loading = judge(Memory(), seen(age=10.0), LIMITS)
    assert judge(loading, seen(at=2e9, age=12.0), LIMITS).verdict == LOADING
    assert judge(loading, seen(at=0.0, age=12.0), LIMITS).verdict == LOADING


def test_another_start_begins_anew(healthy: Memory) -> None:
    memory = judge(judge(healthy, seen(), LIMITS), seen(), LIMITS)
    other = replace(RUNS, invocation="start-2", restarts=1)
    assert judge(memory, seen(state=other, age=5.0), LIMITS).verdict == LOADING


def test_what_no_restart_mends_ends_the_restarts_of_a_service_that_does_not_work(healthy: Memory) -> None:
    suspect = judge(healthy, seen(), LIMITS)
    halt = halted(suspect, "Xid 79 of the GPU")
    assert (halt.verdict, halt.reason) == (HALT, "Xid 79 of the GPU")
    assert halted(judge(Memory(), seen(age=5.0), LIMITS), "Xid 79").verdict == HALT, "while it loads, too"
    assert halted(suspect, "").verdict == SUSPECT
    busy = judge(healthy, seen(counters={**STILL, "vllm:prompt_tokens_total": 11.0}), LIMITS)
    assert halted(busy, "Xid 64 of last week").verdict == BUSY
    assert halted(healthy, "Xid 64 of last week").verdict == watchdog.ANSWERS


@pytest.mark.parametrize("active", ["inactive", "failed", "deactivating"])
def test_a_service_that_does_not_run_is_left_alone(healthy: Memory, active: str) -> None:
    assert judge(healthy, seen(state=replace(RUNS, active=active)), LIMITS).verdict == NOT_RUNNING


def test_faults_count_since_the_first_of_the_starts_in_a_row() -> None:
    first = judge(Memory(), seen(at=1000.0, age=100.0), LIMITS)
    assert first.series_since == 900.0
    again = judge(first, seen(at=2000.0, age=1.0, state=replace(RUNS, invocation="start-2", restarts=1)), LIMITS)
    assert again.series_since == 900.0
    by_hand = judge(again, seen(at=3000.0, age=1.0, state=replace(RUNS, invocation="start-3")), LIMITS)
    assert by_hand.series_since == 2999.0


def test_one_missed_look_is_not_for_a_fault_that_the_service_went_on_after(healthy: Memory) -> None:
    """Xid 64 a week ago, answers since then, one look without an answer: it is not stopped for good."""
    answered = judge(healthy, seen(at=2e9, answered=True), LIMITS)
    suspect = judge(answered, seen(at=2e9 + 60), LIMITS)
    assert (suspect.verdict, watchdog.faults_since(suspect)) == (SUSPECT, 2e9)
    at_last = judge(judge(suspect, seen(at=2e9 + 120), LIMITS), seen(at=2e9 + 180), LIMITS)
    assert (at_last.verdict, watchdog.faults_since(at_last)) == (RESTART, healthy.series_since)


def test_after_a_crash_faults_count_since_the_last_answer(healthy: Memory) -> None:
    answered = judge(healthy, seen(at=2e9, answered=True), LIMITS)
    again = judge(answered, seen(at=2e9 + 90, age=30.0, state=replace(RUNS, invocation="start-2", restarts=1)), LIMITS)
    assert (again.verdict, watchdog.faults_since(again)) == (LOADING, 2e9)


def test_a_start_is_good_once_it_has_answered_for_long_enough() -> None:
    loading = judge(Memory(), seen(age=1200.0), replace(LIMITS, start_timeout_s=2700))
    first = judge(loading, seen(age=1260.0, answered=True), LIMITS)
    early = judge(first, seen(age=2100.0, answered=True), LIMITS)
    assert [memory.settled for memory in (loading, first, early)] == [False] * 3, "loading does not count"
    assert not judge(early, seen(age=2200.0), LIMITS).settled, "a miss settles nothing"
    good = judge(early, seen(age=2160.0, answered=True), LIMITS)
    assert good.settled
    other = seen(age=5.0, answered=True, state=replace(RUNS, invocation="start-2", restarts=1))
    assert not judge(good, other, LIMITS).settled, "each start anew"


@pytest.fixture
def one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Seen], list[list[str]]]:
    """Runs the watchdog once for what it sees; returns the commands that it gave to systemd."""
    deployment.record(tmp_path / "deployments", {"base_url": "http://127.0.0.1:1", "model_name": "m", "unit": ""})

    def run(found: Seen) -> list[list[str]]:
        given: list[list[str]] = []
        monkeypatch.setattr(watchdog, "look", lambda _unit, _client: found)
        monkeypatch.setattr(subprocess, "run", lambda command, **_options: given.append(command))
        monkeypatch.setattr(startup, "unit_state", lambda _unit: found.state)
        folders = [f"--deployments={tmp_path / 'deployments'}", f"--memory={tmp_path / 'memory.json'}"]
        watchdog.main(["--unit=octoserve-main.service", *folders, "--settled=900"])
        return given

    return run


def test_systemd_forgets_the_starts_before_a_good_one_once(one_run: Callable[[Seen], list[list[str]]]) -> None:
    """Else three good crashes within the time of three failing starts leave the service down for good."""
    reset = [["systemctl", "reset-failed", "octoserve-main.service"]]
    assert one_run(seen(age=1200.0, answered=True)) == []
    assert one_run(seen(age=2100.0, answered=True)) == reset
    assert one_run(seen(age=2160.0, answered=True)) == []
    crashed = replace(RUNS, invocation="start-2", restarts=1)
    assert one_run(seen(age=60.0, answered=True, state=crashed)) == [], "a start that answers once is not good yet"
    assert one_run(seen(age=1000.0, answered=True, state=crashed)) == reset


def test_a_recorded_deployment_is_not_asked_before_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its record and its start its model is checked for minutes, and its address may be another."""
    folder, unit = tmp_path / "deployments", tmp_path / "octoserve-main.service"
    for port in (8000, 8001):
        text = f"ExecStart=/bin/server --port={port}"
        deployment.record(folder, {"base_url": f"http://127.0.0.1:{port}", "model_name": "m", "unit": text})
    monkeypatch.setattr(deployment, "UNITS", tmp_path)
    asked: list[str] = []

    def look(_unit: str, client: Client) -> Seen:
        asked.append(client.base_url)
        return seen(answered=True)

    monkeypatch.setattr(watchdog, "look", look)
    for port in (8000, 8001):
        unit.write_text(f"ExecStart=/bin/server --port={port}")
        watchdog.main([f"--unit={unit.name}", f"--deployments={folder}", f"--memory={tmp_path / 'memory.json'}"])
    unit.write_text("ExecStart=/bin/server --port=8000 --edited")
    assert asked == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    assert deployment.started(folder, unit) == 2, "of a unit that is in no record"
    unit.write_text("ExecStart=/bin/server --port=8001")
    deployment.set_state(folder, 2, "failed")
    assert deployment.started(folder, unit) == 1, "one that failed does not run"
    assert deployment.started(tmp_path / "nothing", unit) is None


def test_counters_are_read_from_an_exposition() -> None:
    text = """# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="glm-5"} 1234.0
vllm:num_requests_waiting{engine="0",model_name="glm-5"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="glm-5"} 1.5e-05
http_requests_total{handler="/v1/chat/completions"} 7.0
"""
    assert watchdog.counters(text) == {
        'vllm:prompt_tokens_total{engine="0",model_name="glm-5"}': 1234.0,
        'vllm:kv_cache_usage_perc{engine="0",model_name="glm-5"}': 1.5e-05,
    }


def test_an_exposition_without_the_engine_shows_no_counters(healthy: Memory) -> None:
    """As with disable-log-stats: nothing can stand still, so a long prefill gets the patience of a blind look."""
    found = watchdog.counters('http_requests_total{handler="/v1/chat/completions"} 7.0\n')
    memory = healthy
    for _ in range(3):
        memory = judge(memory, seen(counters=found), LIMITS)
    assert (memory.verdict, "it shows no counters" in memory.reason) == (SUSPECT, True)


def test_memory_survives_and_damage_forgets(tmp_path: Any) -> None:
    path = tmp_path / "memory.json"
    assert watchdog.load(path) == Memory()
    path.write_text('{"verdict": "busy", "failures": 2}')
    assert watchdog.load(path).failures == 2
    path.write_text('{"verdict": "busy", "fail')
    assert watchdog.load(path) == Memory()
