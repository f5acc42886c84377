"""The module throughput_gate and its worker: the real job protocol, a child process in the place of systemd."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Callable

import pytest
from fake_openai_server import COUNT, FakeOpenAiServer, Reply
from octoserve import baseline
from test_model_modules import Host

NO_SWEEPS = {"concurrency": [], "context": [], "mix": {"requests": 0}}
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    host = Host(tmp_path, monkeypatch)

    def call(url: str, **more: Any) -> dict[str, Any]:
        arguments = {
            "name": "throughput-test",
            "base_url": url,
            "floor_tok_s": 10,
            "trials": 2,
            "warmup": 0,
            "sweeps": NO_SWEEPS,
            "baseline": str(tmp_path / "baselines" / "b.json"),
            "start": "s1",
            "_job_wait": 30,
            **more,
        }
        return host.run("throughput_gate", capsys, **arguments)

    return call


def history(tmp_path: Path) -> list[baseline.Start]:
    return baseline.load(tmp_path / "baselines" / "b.json")


def test_a_pass_is_kept_once_and_a_start_measured_again_is_pooled(run: Run, tmp_path: Path) -> None:
    with FakeOpenAiServer(Reply(COUNT, token_s=0.001)) as server:
        found = run(server.url, deployment="0007")
        assert (found["ok"], found["verdict"], found["changed"], found["finished"]) == (True, "pass", True, True)
        assert bool(found["gpus"]) != bool(found["gpus_reason"]), "clocks, or why there are none"
        again = run(server.url, _job_run=found["job_run"])
        assert again["decode_tok_s"] == found["decode_tok_s"], "asked again about a run, it is told, not measured"
        assert len(server.requests) == 2
        (start,) = history(tmp_path)
        assert (start.start, start.deployment, start.trials) == ("s1", "0007", 2)
        run(server.url, deployment="0007")
    (start,) = history(tmp_path)
    assert start.trials == 4
    assert [entry["start"] for entry in found["baseline"]["history"]] == ["s1"]


def test_what_did_not_pass_is_not_kept(run: Run, tmp_path: Path) -> None:
    with FakeOpenAiServer(Reply(COUNT, token_s=0.001)) as server:
        found = run(server.url, floor_tok_s=100000)
    assert (found["ok"], found["verdict"], found["changed"]) == (False, "fail", False)
    assert history(tmp_path) == []


def test_a_regression_is_kept_apart(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "baselines" / "b.json"
    for n in range(3):
        baseline.append(path, baseline.Start(f"e{n}", "", "", 5000.0, 5, 1.0))
    with FakeOpenAiServer(Reply(COUNT, token_s=0.001)) as server:
        found = run(server.url)
        assert (found["ok"], found["verdict"], found["changed"]) == (True, "regression", True)
        assert "slower than the mean 5000.00" in found["reason"]
        assert run(server.url, on_regression="fail")["ok"] is False
    assert [start.regression for start in history(tmp_path)] == [False, False, False, True]


def test_progress_is_told_until_it_is_finished(run: Run) -> None:
    going_on = threading.Event()
    replies = iter([Reply(COUNT, token_s=0.001)])

    def script(_body: object) -> Reply:
        reply = next(replies, None)
        if reply is None:
            going_on.wait(20)
        return Reply(COUNT, token_s=0.001)

    with FakeOpenAiServer(script) as server:
        found = run(server.url, _job_wait=0)
        while "1 of 2 trials" not in found["progress"]["text"]:
            assert not found["finished"]
            found = run(server.url, _job_wait=0.1, _job_run=found["job_run"])
        assert found["progress"]["text"].startswith("throughput: counting, 50 %")
        going_on.set()
        found = run(server.url, _job_run=found["job_run"])
    assert (found["finished"], found["verdict"]) == (True, "pass")


def test_the_api_key_is_sent_and_lies_nowhere(run: Run, tmp_path: Path) -> None:
    with FakeOpenAiServer(Reply(COUNT, token_s=0.001)) as server:
        found = run(server.url, api_key="sk-very-secret")
        assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    left = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert "throughput" in left
    assert "sk-very-secret" not in left + json.dumps(found)


def test_a_damaged_baseline_fails_the_module(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "baselines" / "b.json"
    path.parent.mkdir()
    path.write_text("{}")
    with FakeOpenAiServer(Reply(COUNT, token_s=0.001)) as server:
        found = run(server.url)
        assert server.requests == []
    assert found["failed"]
    assert "move the file away" in found["msg"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"floor_tok_s": 0}, "the gate could not fail"),
        ({"trials": 0}, "the gate could not fail"),
        ({"sweeps": {"contexts": []}}, "unknown key sweeps.contexts"),
    ],
)
def test_a_wrong_setting_fails_before_anything_is_asked(run: Run, wrong: dict[str, Any], message: str) -> None:
    with FakeOpenAiServer(Reply(COUNT)) as server:
        found = run(server.url, **wrong)
        assert server.requests == []
    assert found["failed"]
    assert message in found["msg"]


def test_check_mode_claims_nothing(run: Run, tmp_path: Path) -> None:
    with FakeOpenAiServer(Reply(COUNT)) as server:
        found = run(server.url, check=True, sweeps={"context": [0]})
        assert server.requests == []
    assert (found["ok"], found["skipped"], found["changed"]) == (False, True, False)
    assert "then measure 6 points: mix, concurrency 1" in found["msg"]
    assert history(tmp_path) == []
