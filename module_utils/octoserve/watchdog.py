"""Watchdog: restarts a service whose engine hangs behind a healthy port, and leaves a busy one alone.

    python -m octoserve.watchdog --unit octoserve-main.service --deployments /var/lib/octoserve/deployments/main …

Run by a timer. Each run asks the deployment that was started for one token and reads the server's counters. A server in
a prefill of minutes does not answer in time, but its counters move; a hung one does not answer and its counters stand
still. Only where that is so in several runs in a row, the service is restarted. Where the driver reported a fault that
no restart mends, or a card is lost, it is stopped instead, and stays so. What was seen is kept in a file between runs.
Once a start has answered for long enough, systemd forgets the starts before it: crashes of a service that serves do not
add up to a start that is refused.

Ends 0 where there is nothing to do, 3 where the service was restarted, 4 where it was stopped for good.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import requests

from . import atomic, deployment, nvml, startup, xid
from .openai_api import ApiError, Client

if TYPE_CHECKING:
    from octoserve.startup import UnitState

#: Metrics of the engine that move while it computes, also in a long prefill, whose tokens are counted at its end only.
COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:num_preemptions_total",
)
#: HTTP statuses of a server that is there and has no room or no time.
FULL = (408, 429)
#: Seconds that NVML gets, whose cards are awake; of a record of the first versions, seconds that a start gets.
NVML_S, START_TIMEOUT_S = 20.0, 2700.0
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?P<labels>\{.*\})? (?P<value>\S+)", re.MULTILINE)
ANSWERS, BUSY, LOADING, NOT_RUNNING, SUSPECT, RESTART, HALT = (
    *("answers", "busy", "loading", "not running", "suspect", "restart", "halt"),
)
EXIT_CODES = {RESTART: 3, HALT: 4}
#: A server that shows no counters may be overloaded and at work: it gets so many times the patience.
BLIND = 3


@dataclass(frozen=True)
class Limits:
    """When to act: failed probes in a row, and seconds that a start may take until the first answer.

    ``settled_s``: seconds from its first answer to the one with which a start counts as good.
    """

    failures: int
    start_timeout_s: float
    settled_s: float


@dataclass(frozen=True)
class Seen:
    """What one run saw. ``counters``: None where the server did not show them.

    ``at``: seconds since 1970, for people. ``age``: seconds since the start began, whatever the clock was set to.
    """

    at: float
    state: UnitState
    age: float
    answered: bool
    refusal: str = ""
    counters: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Memory:
    """What is kept between runs, of one start of the service. Times are seconds since 1970."""

    verdict: str = NOT_RUNNING
    reason: str = ""
    at: float = 0.0
    invocation: str = ""
    answered: bool = False
    answered_at: float = 0.0
    answered_age: float | None = None  # seconds from its beginning to the first answer seen
    settled: bool = False
    failures: int = 0
    counters: Mapping[str, float] | None = None
    series_since: float = (
        0.0  # when the starts began that systemd made one after another, none of which answered before
    )


def judge(memory: Memory, seen: Seen, limits: Limits) -> Memory:
    """What to do, and what to remember. ``verdict`` of the result is one of the words above."""
    if seen.state.invocation != memory.invocation:
        again = seen.state.restarts and memory.series_since
        since = max(memory.series_since, memory.answered_at) if again else seen.at - seen.age
        memory = Memory(invocation=seen.state.invocation, series_since=since)
    now = replace(memory, at=seen.at)
    if not seen.state.alive:
        return replace(now, verdict=NOT_RUNNING, reason=f"unit is {seen.state.active} ({seen.state.result})")
    if seen.answered:
        first = seen.age if now.answered_age is None else now.answered_age
        now = replace(now, answered=True, answered_at=seen.at, answered_age=first, failures=0, counters=seen.counters)
        return replace(now, verdict=ANSWERS, reason="", settled=now.settled or seen.age - first >= limits.settled_s)
    return _silent(now, seen, limits)


def _silent(now: Memory, seen: Seen, limits: Limits) -> Memory:
    """The verdict on a service that runs and did not answer: it loads, it works, or it hangs."""
    if not now.answered:
        if seen.age <= limits.start_timeout_s:
            return replace(now, verdict=LOADING, reason=f"no answer yet, {seen.age:.0f} s after its start")
        return replace(now, verdict=RESTART, reason=f"no answer {seen.age:.0f} s after its start: {seen.refusal}")
    if seen.counters is not None and seen.counters != now.counters:
        reason = f"no answer ({seen.refusal}), but its counters move"
        return replace(now, verdict=BUSY, reason=reason, failures=0, counters=seen.counters)
    failures = now.failures + 1
    blind = seen.counters is None
    told = "it shows no counters" if blind else "its counters stand still"
    reason = f"no answer {failures} times in a row, {told}: {seen.refusal}"
    patience = limits.failures * (BLIND if blind else 1)
    return replace(now, verdict=RESTART if failures >= patience else SUSPECT, reason=reason, failures=failures)


def halted(memory: Memory, fault: str) -> Memory:
    """The verdict where a service that does not answer, and does not work either, has a fault that no restart mends."""
    if fault and memory.verdict in (SUSPECT, RESTART, LOADING):
        return replace(memory, verdict=HALT, reason=fault)
    return memory


def faults_since(memory: Memory) -> float:
    """From when on a fault counts, seconds since 1970.

    A service that went on after a fault and then misses one look need not suffer from it; one that is to be restarted
    may.
    """
    return max(memory.answered_at, memory.series_since) if memory.verdict == SUSPECT else memory.series_since


def counters(exposition: str) -> dict[str, float] | None:
    """The engine's counters in a Prometheus exposition, by name and labels. None: it shows none (disable-log-stats)."""
    found = {}
    for match in _SAMPLE.finditer(exposition):
        if match["name"] in COUNTERS:
            found[match["name"] + (match["labels"] or "")] = float(match["value"])
    return found or None


def load(path: Path) -> Memory:
    """What earlier runs remembered; nothing where the file is absent or damaged."""
    try:
        return Memory(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Memory()


def look(unit: str, client: Client) -> Seen:
    """See how the service is."""
    at, state, age = time.time(), startup.unit_state(unit), startup.seconds_since_start(unit)
    if not state.alive:
        return Seen(at, state, age, answered=False)
    try:
        client.chat([{"role": "user", "content": "Say hello."}], max_tokens=1)
        answered, refusal = True, ""
    except ApiError as error:
        # A server that refuses is at work; that its key or model is another than here, no restart mends. One that is
        # full may be hung behind its queue: the counters tell.
        answered = error.status is not None and 400 <= error.status < 500 and error.status not in FULL
        refusal = str(error)
    return Seen(at, state, age, answered, refusal, _read_counters(client.base_url, client.timeout))


def _read_counters(base_url: str, timeout: float) -> dict[str, float] | None:
    with requests.Session() as session:
        session.trust_env = False  # a proxy of the environment is for downloads
        try:
            answer = session.get(f"{base_url}/metrics", timeout=timeout)
        except requests.RequestException:
            return None
    return counters(answer.text) if answer.ok else None


def fault(since: float) -> str:
    """What the driver says that no restart mends, empty where it says nothing."""
    found = xid.fatal(xid.kernel_log(since))
    if found:
        return f"{found}: {found.remedy}"
    try:
        with nvml.session(NVML_S) as read:
            read()
    except nvml.GpuError as error:
        return str(error) if error.problem == nvml.LOST_CARD else ""
    return ""


def forget_failures(unit: str) -> None:
    """Set systemd's count of starts, which StartLimitBurst bounds, and that of restarts to zero.

    That is what reset-failed does to a unit that runs: systemctl(1).
    """
    subprocess.run(["systemctl", "reset-failed", unit], check=True, timeout=60)


def act(memory: Memory, unit: str) -> None:
    """Restart or stop the service where that is the verdict, unless somebody else has done so since it was seen."""
    if memory.verdict not in EXIT_CODES:
        return
    state = startup.unit_state(unit)
    if state.alive and state.invocation == memory.invocation:
        verb = "try-restart" if memory.verdict == RESTART else "stop"
        subprocess.run(["systemctl", "--no-block", verb, unit], check=True, timeout=60)


def main(argv: Sequence[str] | None = None) -> int:
    """One run."""
    parser = argparse.ArgumentParser(prog="octoserve.watchdog", description="Restart a service that hangs.")
    parser.add_argument("--unit", help="unit of the service")
    parser.add_argument("--deployments", type=Path, help="folder of the instance's deployments")
    parser.add_argument("--memory", type=Path, help="file that is kept between runs")
    parser.add_argument("--probe-timeout", type=float, default=30.0, help="seconds to wait for one token")
    parser.add_argument("--failures", type=int, default=3, help="failed probes in a row before a restart")
    parser.add_argument("--settled", type=float, default=900.0, help="seconds of answers that make a start a good one")
    options = parser.parse_args(argv)
    number = deployment.started(options.deployments, deployment.UNITS / options.unit)
    if number is None:
        print(f"{options.deployments} holds no deployment that is in service")
        return 0
    content = deployment.read(options.deployments, number)
    client = Client(content["base_url"], content["model_name"], os.environ.get("VLLM_API_KEY"), options.probe_timeout)
    limits = Limits(options.failures, float(content.get("start_timeout", START_TIMEOUT_S)), options.settled)
    before = load(options.memory)
    found = judge(before, look(options.unit, client), limits)
    if found.settled and not (before.settled and before.invocation == found.invocation):
        forget_failures(options.unit)
    _keep(options.memory, found)
    if content.get("gpus") and found.verdict in (SUSPECT, RESTART, LOADING):
        found = halted(found, fault(faults_since(found)))
        _keep(options.memory, found)
    line = f"{options.unit}: {found.verdict}" + (f": {found.reason}" if found.reason else "")
    print(line, file=sys.stderr if found.verdict in EXIT_CODES else sys.stdout, flush=True)
    act(found, options.unit)
    return EXIT_CODES.get(found.verdict, 0)


def _keep(path: Path, memory: Memory) -> None:
    atomic.write_text(path, json.dumps(asdict(memory)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
