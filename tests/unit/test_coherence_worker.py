"""The coherence gate's worker: what a first deploy measured is recorded where one start of the service gave it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from octoserve import coherence, coherence_worker, job, reference, startup

SUITE = {"name": "mine", "cases": [{"name": "prose", "score": {"text": "A text.", "ceiling": 60}}]}
ENTRY = {"identity": "0" * 64, "logprobs": [-0.5, -1.0], "perplexity": 2.1}


def record(folder: Path, monkeypatch: pytest.MonkeyPatch, state: tuple[str, str, str]) -> dict[str, Any]:
    """Ask as a first deploy of the start "first"; ``state`` is the unit's afterwards: its start, what it does."""
    passed = {"ok": True, "cases": [], "to_record": {"prose": ENTRY}}
    invocation, active, sub = state
    monkeypatch.setattr(coherence, "run", lambda *asked: dict(passed))
    monkeypatch.setattr(startup, "unit_state", lambda unit: startup.UnitState(active, sub, "", "", invocation, 0))
    spec = {
        **{"base_url": "http://127.0.0.1:1", "model": "m", "request_timeout": 1, "told": {"stack": "engine-1"}},
        **{"record": str(folder / "record.json"), "settings": {"bootstrap": True}},
        **{"unit": "octoserve-main.service", "start": "first"},
    }
    progress = job.Progress(folder / "state.json", {})
    return coherence_worker.work(spec, {"api_key": "", "suites": [SUITE]}, progress)


def test_what_one_start_measured_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert record(tmp_path, monkeypatch, ("first", "active", "running"))["recorded"] == ["prose"]
    assert reference.load(tmp_path / "record.json")["prose"]["stack"] == "engine-1"


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (("second", "active", "running"), r"found invocation second, active \(running\), wanted first"),
        (("first", "activating", "auto-restart"), r"found invocation first, activating \(auto-restart\)"),
        (("", "inactive", "dead"), "found invocation none, inactive"),
    ],
)
def test_answers_of_two_starts_are_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: tuple[str, str, str], found: str
) -> None:
    with pytest.raises(job.WorkerError, match=found):
        record(tmp_path, monkeypatch, state)
    assert not (tmp_path / "record.json").exists()
