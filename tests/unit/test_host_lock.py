"""One run at a time; a holder whose connection or process is gone is no obstacle."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from module_runner import Runner
from octoserve import lock
from octoserve.lock import Holder, LockedError, Process

ROOT = Path(__file__).parents[2]
ME = Holder("ann@laptop", "ansible-playbook site.yml", "laptop 1", Process(100, 7))
OTHER = Holder("ci@runner", "ansible-playbook site.yml", "runner 1", Process(100, 7))


class Proc:
    """A made-up /proc: `process(pid, name, parent, started)`; this test's own process comes over a connection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process(40, "sshd", 1, 400)
        self.process(50, "sshd: admin", 40, 500)
        self.process(os.getpid(), "python3", 50, 900)

    def process(self, pid: int, name: str, parent: int, started: int) -> None:
        (self.folder / str(pid)).mkdir(exist_ok=True)
        rest = " ".join(["S", str(parent), *["0"] * 17, str(started), "0"])
        (self.folder / str(pid) / "stat").write_text(f"{pid} ({name}) {rest}\n")

    def ends(self, pid: int) -> None:
        (self.folder / str(pid) / "stat").unlink()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    (tmp_path / "proc").mkdir()
    return Proc(tmp_path / "proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_a_run_takes_it_again_and_gives_it_back(folder: Path, proc: Proc) -> None:
    assert lock.acquire(folder, ME, proc=proc.folder) is True
    assert lock.acquire(folder, ME, proc=proc.folder) is False
    assert lock.release(folder, ME) is True
    assert lock.read(folder) is None
    assert lock.release(folder, ME) is False


def test_another_run_is_refused_and_told_who_has_it(folder: Path, proc: Proc) -> None:
    lock.acquire(folder, OTHER, proc=proc.folder)
    with pytest.raises(LockedError, match=r"ci@runner \(ansible-playbook site.yml, process 100 there, since 2"):
        lock.acquire(folder, ME, proc=proc.folder)
    assert lock.release(folder, ME) is False, "only its holder gives it back"


def test_a_holder_whose_connection_is_gone_is_no_obstacle(folder: Path, proc: Proc) -> None:
    lock.acquire(folder, OTHER, proc=proc.folder)
    proc.process(60, "sshd: admin", 40, 600)
    proc.process(os.getpid(), "python3", 60, 900)
    proc.ends(50)
    assert lock.acquire(folder, ME, proc=proc.folder) is True


def test_a_later_process_with_its_number_is_not_the_connection(folder: Path, proc: Proc) -> None:
    lock.acquire(folder, OTHER, proc=proc.folder)
    proc.process(50, "sshd: admin", 40, 501)
    assert lock.acquire(folder, ME, proc=proc.folder) is True


def test_a_holder_that_its_controller_knows_to_be_dead_is_no_obstacle(folder: Path, proc: Proc) -> None:
    lock.acquire(folder, OTHER, proc=proc.folder)
    with pytest.raises(LockedError):
        lock.acquire(folder, ME, dead=replace(OTHER, run=Process(101, 7)), proc=proc.folder)
    assert lock.acquire(folder, ME, dead=OTHER, proc=proc.folder) is True


def test_the_connection_is_found_through_sudo_and_shells(folder: Path, proc: Proc) -> None:
    for pid, name, parent in ((70, "sshd-session", 40), (71, "sh", 70), (72, "sudo (x) y", 71), (73, "python3", 72)):
        proc.process(pid, name, parent, pid)
    assert lock.connection_of(73, proc.folder) == Process(70, 70)


def test_without_ssh_it_is_the_run_and_not_its_fork(folder: Path, proc: Proc) -> None:
    for pid, name, parent in (
        (80, "bash", 1),
        (81, "ansible-playboo", 80),
        (82, "ansible-playboo", 81),
        (83, "sh", 82),
    ):
        proc.process(pid, name, parent, pid)
    assert lock.connection_of(83, proc.folder) == Process(81, 81)


def test_a_connection_that_nobody_knows_holds_until_its_run_is_dead(folder: Path, proc: Proc) -> None:
    proc.process(os.getpid(), "python3", 90, 900)
    proc.process(90, "tailscaled", 1, 90)
    lock.acquire(folder, OTHER, proc=proc.folder)
    with pytest.raises(LockedError):
        lock.acquire(folder, ME, proc=proc.folder)
    assert lock.acquire(folder, ME, dead=OTHER, proc=proc.folder) is True


@pytest.mark.parametrize("text", ["", "{", "[]", '{"who": 1}', '{"connection": 5}'])
def test_a_damaged_lock_is_nobodys(folder: Path, proc: Proc, text: str) -> None:
    folder.mkdir()
    (folder / lock.NAME).write_text(text)
    assert lock.acquire(folder, ME, proc=proc.folder) is True


@pytest.fixture
def connection() -> Iterator[Process]:
    """A real process that stands for a connection."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = lock.process(child.pid)
        assert found
        yield found
        child.kill()


def test_the_module_names_the_holder(
    folder: Path, connection: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Runner(monkeypatch, capsys)
    arguments = {"path": str(folder), "_run": asdict(ME)}
    assert run.changed("host_lock", **arguments) is False, "it is gone after the run"
    held = replace(OTHER, connection=connection, since="2026-11-30 10:00:00 UTC")
    (folder / lock.NAME).write_text(json.dumps(asdict(held)))
    answer = run("host_lock", **arguments)
    assert "locked by ci@runner" in answer["msg"]
    assert answer["holder"]["run"] == {"pid": 100, "started": 7}
    assert not run("host_lock", check=True, **arguments).get("failed"), "a check is warned"
    assert not run("host_lock", _dead=answer["holder"], **arguments).get("failed")
    run("host_lock", state="free", **arguments)
    assert lock.read(folder) is None


def test_a_lock_whose_connection_has_ended_is_taken_again_with_a_warning(
    folder: Path, connection: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Runner(monkeypatch, capsys)
    warned: list[str] = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda _module, text: warned.append(text))
    arguments = {"path": str(folder), "_run": asdict(ME)}
    first, again = run("host_lock", **arguments), run("host_lock", **arguments)
    assert (first["news"], again["news"]) == (True, False)
    assert not warned
    held = lock.read(folder)
    assert held
    (folder / lock.NAME).write_text(json.dumps(asdict(replace(held, connection=connection))))
    assert not run("host_lock", **arguments).get("failed")
    assert "the connection over which this run took the lock of this host is gone" in warned[0]


def test_whoever_takes_it_asks_once_more_whether_the_connection_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("host_lock", ROOT / "action_plugins/host_lock.py")
    assert spec
    assert spec.loader
    plugin: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    monkeypatch.setattr(plugin.ActionBase, "run", lambda action, tmp, task_vars: {})
    monkeypatch.setattr(plugin, "this_run", lambda: ME)
    answers = [{"changed": False, "news": True}, {"changed": False, "news": False, "warnings": ["it is gone"]}]
    action = plugin.ActionModule.__new__(plugin.ActionModule)
    action._task = SimpleNamespace(args={"path": "/state"}, action="host_lock")
    action._execute_module = lambda module_args, task_vars: answers.pop(0)
    assert action.run() == {"changed": False, "warnings": ["it is gone"]}
    assert answers == []
