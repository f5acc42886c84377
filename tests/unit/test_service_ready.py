"""Ready means a completion; a start that dies ends the wait with its cause, and every wait ends."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from fake_openai_server import FakeOpenAiServer, Reply
from module_runner import Runner

RUNS = "ActiveState=activating\\nSubState=start\\nInvocationID=0123\\n"
DIED = "ActiveState=activating\\nSubState=auto-restart\\nResult=exit-code\\nExecMainStatus=1\\nInvocationID=0123\\n"
JOURNAL = "INFO 11-30 01:02:03 [a.py:1] Loading weights\\nKeyError: indexer.weights_proj\\n"


class Host:
    """A unit as systemctl and journalctl tell of it: stand-ins on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.says("systemctl", RUNS)
        self.says("journalctl", "INFO 11-30 01:02:03 [a.py:1] Loading weights\\n")

    def says(self, program: str, text: str, status: int = 0) -> None:
        path = self.folder / program
        path.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
        path.chmod(0o755)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Host(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def options(url: str, **more: Any) -> dict[str, Any]:
    return {"unit": "octoserve-test.service", "base_url": url, "model": "fake", "_job_wait": 0.0, **more}


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("host")
def test_a_completion_ends_the_wait(run: Runner) -> None:
    with FakeOpenAiServer(Reply("Hello")) as server:
        answer = run("service_ready", **options(server.url))
        (request,) = server.requests
    assert (answer["finished"], answer["changed"], answer["answer"]) == (True, False, "Hello")
    assert (request["model"], request["max_tokens"]) == ("fake", 1)


@pytest.mark.usefixtures("host")
def test_meanwhile_the_journal_is_shown(run: Runner, nobody: str) -> None:
    first = run("service_ready", **options(nobody))
    assert (first["finished"], first["changed"]) == (False, False)
    assert first["progress"]["text"].endswith(": Loading weights")
    again = run("service_ready", **options(nobody, _job_run=first["job_run"]))
    assert again["job_run"] == first["job_run"], "the wait goes on from its first call"


@pytest.mark.usefixtures("host")
def test_the_wait_ends_at_its_limit(run: Runner, nobody: str) -> None:
    before = str(time.clock_gettime(time.CLOCK_BOOTTIME) - 10)
    message = run.error("service_ready", **options(nobody, _job_run=before, timeout=5))
    assert "gave no completion within 5 s" in message
    assert "Its journal: Loading weights" in message


@pytest.mark.usefixtures("host")
def test_a_clock_that_is_set_ahead_meanwhile_does_not_end_the_wait(
    run: Runner, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run("service_ready", **options(nobody))
    ahead = time.time() + 2 * 2700
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert run("service_ready", **options(nobody, _job_run=first["job_run"]))["finished"] is False


def test_a_dead_start_ends_the_wait_with_its_cause(host: Host, run: Runner, nobody: str) -> None:
    host.says("systemctl", DIED)
    host.says("journalctl", JOURNAL)
    answer = run("service_ready", **options(nobody))
    assert answer["failed"]
    assert "died while starting (exit-code, exit status 1): KeyError: indexer.weights_proj." in answer["msg"]
    assert answer["msg"].endswith("journalctl -u octoserve-test.service")
    assert answer["journal"][-1] == "KeyError: indexer.weights_proj"


def test_a_start_that_a_guard_refused_names_what_it_found(host: Host, run: Runner, nobody: str) -> None:
    edited = "octoserve.guard_deployment: /opt/r/core.py:12: edited"
    old_server = "ValueError: of the server that was stopped\\n"
    host.says("journalctl", f"{old_server}Starting.\\n{edited}\\nFailed.\\nStarting.\\n{edited}\\nFailed.\\n")
    # Also where a later attempt has begun meanwhile.
    for state in (DIED, RUNS):
        host.says("systemctl", state)
        told = {"refused": "Unable to restart: See systemctl status", "since": "2026-12-01 03:15:45"}
        message = run.error("service_ready", **options(nobody, **told))
        assert message == (
            f"octoserve-test.service did not start: {edited}. All of it: journalctl -u octoserve-test.service"
        )


def test_a_start_that_systemd_refused_says_why(host: Host, run: Runner, nobody: str) -> None:
    host.says("journalctl", "")
    message = run.error("service_ready", **options(nobody, refused="Unit has a bad unit file setting."))
    assert "did not start: Unit has a bad unit file setting. its journal is empty." in message


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_will_never_answer_ends_the_wait(run: Runner, status: int) -> None:
    with FakeOpenAiServer(Reply("no", status=status)) as server:
        message = run.error("service_ready", **options(server.url, api_key="a-secret-key", _job_wait=30.0))
    assert "octoserve-test.service runs, but refuses a completion" in message
    assert str(status) in message
    assert "a-secret-key" not in message


@pytest.mark.usefixtures("host")
def test_a_server_that_is_not_yet_ready_is_waited_for(run: Runner) -> None:
    replies = iter([Reply(status=503), Reply("Hello")])
    with FakeOpenAiServer(lambda _: next(replies)) as server:
        assert run("service_ready", **options(server.url, _job_wait=30.0))["answer"] == "Hello"


def test_a_systemd_that_does_not_answer_is_named(host: Host, run: Runner, nobody: str) -> None:
    host.says("systemctl", "", status=1)
    assert "systemd does not answer about octoserve-test.service" in run.error("service_ready", **options(nobody))


@pytest.mark.usefixtures("host")
def test_check_mode_asks_nobody(run: Runner, nobody: str) -> None:
    assert run("service_ready", check=True, **options(nobody))["changed"] is False
