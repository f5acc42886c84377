"""What the run of the faults writes down: a verdict with its bound, kept for a run that is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import results
from tests.faults import daily, redeploy, run, suites
from tests.faults.host import ROOT, FaultError, Host


def meets(host: Host) -> None:
    """A case of these tests."""


def case(name: str = "a fault", meet: Callable[[Host], Any] = meets) -> redeploy.Case:
    return redeploy.Case(name, "well", meet, short=True, runs=1)


@pytest.mark.parametrize("over", [-0.1, 0.0, 0.1])
def test_only_what_ends_within_its_bound_is_ok(over: float) -> None:
    found = run.outcome(case(), lambda: redeploy.RUN_S + over)
    assert found["ok"] is (over <= 0)
    assert ("found" in found) is (over > 0)


def test_what_does_not_end_as_it_must_tells_why() -> None:
    def meet() -> None:
        raise FaultError("it is down")

    assert run.outcome(case(), meet) == {"ok": False, "found": "it is down"}


def test_a_task_that_was_killed_is_told() -> None:
    found = run.outcome(case(), lambda: "Write the unit")
    assert (found["ok"], found["at"]) == (True, "Write the unit")


def test_the_digest_tells_a_changed_case() -> None:
    def other(host: Host) -> None:
        """Another case."""

    def closed(word: str) -> Callable[[Host], object]:
        return lambda _host: word

    digests = [suites.digest(case(meet=meet)) for meet in (meets, other, closed("a"), closed("b"))]
    assert len(set(digests)) == 4
    assert suites.digest(case("another name")) == digests[0]


class Faults:
    """Two cases that are met on no host; the second one ends as told."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.met: list[str] = []
        self.good = True
        self.result = tmp_path / "result.json"
        self.environment = monkeypatch
        monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
        monkeypatch.setattr(suites, "SUITES", {"redeploy": [case("one"), case("two")]})
        monkeypatch.setattr(suites, "meet", self.meet)
        monkeypatch.setattr(Host, "fresh", lambda host: None)

    def meet(self, _host: Host, met: suites.Case) -> None:
        self.met.append(met.name)
        if met.name == "two" and not self.good:
            raise FaultError("wrong")

    def run(self, *options: str) -> int:
        self.met.clear()
        words = ["run", "redeploy", "--host", "h=127.0.0.9", "--all", "--save", str(self.result), *options]
        self.environment.setattr(sys, "argv", words)
        return run.main()

    def rows(self) -> dict[str, bool]:
        return {row["fault"]: row["ok"] for row in json.loads(self.result.read_text())["faults"]}


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(tmp_path, monkeypatch)


def test_a_run_goes_on_where_it_was_and_asks_again_what_was_wrong(faults: Faults) -> None:
    faults.good = False
    assert faults.run() == 1
    assert faults.rows() == {"one": True, "two": False}
    faults.good = True
    assert faults.run() == 0
    assert faults.met == ["two"]
    assert faults.rows() == {"one": True, "two": True}


def test_changed_code_is_met_anew(faults: Faults) -> None:
    faults.run()
    faults.environment.setattr(results, "digest", lambda covers: "another")
    faults.run()
    assert faults.met == ["one", "two"]


def test_a_part_keeps_the_other_rows(faults: Faults) -> None:
    faults.run()
    before = json.loads(faults.result.read_text())
    faults.run("--only", "two")
    assert json.loads(faults.result.read_text()) == before


def test_a_run_without_random_kills_keeps_those_of_before(faults: Faults) -> None:
    faults.run("--random", "3")
    assert len(faults.rows()) == 5
    faults.run()
    assert len(faults.rows()) == 5
    faults.run("--random", "1")
    assert len(faults.rows()) == 3


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redeploy, "TIMEOUT_S", 0.2)
    assert redeploy.Run("sleep", "60").end().code == -signal.SIGKILL


def test_words_are_found_where_ansible_breaks_the_line() -> None:
    redeploy.ends(redeploy.Run("printf", "is the\n    disk full?"), 0, "is the disk full?")
    with pytest.raises(FaultError, match="wanted 0 and \\['is the disk full'\\]"):
        redeploy.ends(redeploy.Run("printf", "no"), 0, "is the disk full")


@pytest.mark.parametrize(("number", "task"), [(1, "a"), (3, "c"), (7, "b")])
def test_a_random_kill_meets_a_task_in_a_run_of_any_length(
    monkeypatch: pytest.MonkeyPatch, number: int, task: str
) -> None:
    lines = "TASK [a] *\\nTASK [b] *\\nTASK [c] *\\n"
    monkeypatch.setattr(redeploy, "playbook", lambda *words: redeploy.Run("printf", lines))
    assert redeploy._kill_at(number, "fake", 0.0) == task


def test_a_key_among_the_arguments_of_a_process_is_found() -> None:
    shown = "a-key-of-nobody"
    with daily.no_argument_holds(shown):
        subprocess.run(["sleep", "0.2"], check=True, env={"KEY": shown, "PATH": os.environ["PATH"]})
    with pytest.raises(FaultError, match=r"time\.sleep.* a-key-of-nobody"), daily.no_argument_holds(shown):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.5)", shown], check=True)


def test_the_digest_of_covered_code_is_of_what_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "code").mkdir()
    seen = set()
    for name, text in [("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("read.md", "3")]:
        (tmp_path / "code" / name).write_text(text)
        seen.add(results.digest(["code", ":(exclude)*.md"]))
    assert len(seen) == 3


def tracked(*paths: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


def test_results_speak_of_whatever_a_deploy_runs() -> None:
    """Nothing that a chapter, a role, a template or a module uses may be left out of what makes a result old."""
    plugins = ("action_plugins", "callback_plugins", "filter_plugins", "library", "module_utils")
    used = tracked(*plugins, "playbooks", "roles", "templates", "site.yml", "scripts/redeploy.py", ":(exclude)*.md")
    assert used - tracked(*suites.COVERS) == set()


@pytest.mark.parametrize("path", [path for path in suites.COVERS if not path.startswith(":")])
def test_what_results_speak_of_is_there(path: str) -> None:
    assert (ROOT / path).exists()
