"""The modules hub_fetch, gguf_merge and gguf_info, and the action plugin that follows a job, run in this process.

Jobs are child processes of the test instead of systemd units; molecule runs them under systemd.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ansible.module_utils
import fake_gguf_split
import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.testing import patch_module_args
from gguf_writer import tiny_set
from octoserve import fetch as fetch_plan
from octoserve import job
from octoserve.receipt import Receipt

ROOT = Path(__file__).parents[2]
Answer = dict[str, Any]


class Processes:
    """Stands in for systemd: a unit is a child process of the test."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, work: job.Job, command: list[str], environment: dict[str, str]) -> None:
        self.running[work.unit] = subprocess.Popen(command, env={**os.environ, **environment})

    def alive(self, work: job.Job) -> bool:
        return work.unit in self.running and self.running[work.unit].poll() is None

    def stop(self, work: job.Job) -> None:
        self.running[work.unit].kill()
        self.running[work.unit].wait(10)


class Host:
    """Runs modules with a jobs folder of its own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.jobs, self.processes, self.monkeypatch = root, root / "jobs", Processes(), monkeypatch
        self.dest = root / "models" / "tiny"
        self.share = root / "share"
        self.splits = tiny_set(self.share)
        tool = root / "llama-gguf-split"
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_gguf_split.__file__} "$@"\n')
        tool.chmod(0o755)
        self.tool = tool
        monkeypatch.setattr(
            ansible.module_utils, "__path__", [*ansible.module_utils.__path__, str(ROOT / "module_utils")]
        )

    def run(self, called: str, capsys: pytest.CaptureFixture[str], check: bool = False, **arguments: Any) -> Answer:
        module = self.load(called)
        capsys.readouterr()
        with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            module.main()
        answer: Answer = json.loads(capsys.readouterr().out)
        return answer

    def load(self, name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"library_{name}", ROOT / "library" / f"{name}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "follow"):
            jobs = importlib.import_module("ansible.module_utils.octoserve.job")
            self.monkeypatch.setattr(jobs, "_POLL", 0.02)
            follow = functools.partial(
                jobs.follow,
                launcher=self.processes,
                jobs=self.jobs,
                library=ROOT / "module_utils",
                python=Path(sys.executable),
            )
            self.monkeypatch.setattr(module, "follow", follow)
        return module

    def fetch(self, **more: Any) -> Answer:
        files = [{"path": path.name, "sha256": _sha(path), "size": path.stat().st_size} for path in self.splits]
        source = {"url": str(self.share), "files": files}
        return {"name": "tiny", "dest": str(self.dest), "sources": [source], "_job_wait": 30, **more}

    def merge(self, **more: Any) -> Answer:
        return {
            "name": "tiny",
            "splits": [{"path": str(self.dest / path.name), "sha256": _sha(path)} for path in self.splits],
            "output": str(self.dest / "tiny.gguf"),
            "tool": str(self.tool),
            "_job_wait": 30,
            **more,
        }


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


Run = Callable[..., Answer]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


@pytest.fixture
def run(host: Host, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda called, **arguments: host.run(called, capsys, **arguments)


# --- hub_fetch -------------------------------------------------------------------------------------


def test_fetch_changes_once(host: Host, run: Run) -> None:
    first = run("hub_fetch", **host.fetch())
    assert (first["changed"], first["finished"]) == (True, True)
    assert first["fetched"] == [path.name for path in host.splits]
    again = run("hub_fetch", **host.fetch())
    assert (again["changed"], again["finished"], again["fetched"]) == (False, True, [])
    assert again["files"] == first["files"]


def test_fetch_in_check_mode_says_what_is_missing_and_touches_nothing(host: Host, run: Run) -> None:
    answer = run("hub_fetch", check=True, **host.fetch())
    assert answer["changed"]
    assert answer["fetched"] == [path.name for path in host.splits]
    assert answer["bytes_fetched"] == sum(path.stat().st_size for path in host.splits)
    assert answer["msg"].startswith("would fetch 3 file(s)")
    assert answer["diff"]["before"] == ""
    assert not host.dest.exists()
    assert not host.jobs.exists()


def test_fetch_follows_its_own_job_to_the_end(host: Host, run: Run) -> None:
    """What the action plugin does: the second call must say changed, though by then nothing is missing."""
    first = run("hub_fetch", **host.fetch(_job_wait=0))
    assert not first["finished"]
    assert first["diff"]["after"]
    last = run("hub_fetch", **host.fetch(_job_run=first["job_run"]))
    assert (last["changed"], last["finished"]) == (True, True)


def test_fetch_passes_on_the_error_of_its_job(host: Host, run: Run) -> None:
    arguments = host.fetch()
    host.splits[1].write_bytes(b"x" * host.splits[1].stat().st_size)
    answer = run("hub_fetch", **arguments)
    assert answer["failed"]
    assert "tiny-00002-of-00003.gguf: sha256 is" in answer["msg"]


def test_fetch_skips_what_is_not_needed(host: Host, run: Run) -> None:
    names = [path.name for path in host.splits]
    answer = run("hub_fetch", check=True, **host.fetch(skip=names[:2]))
    assert answer["fetched"] == names[2:]


def test_fetch_refuses_bad_sources(host: Host, run: Run) -> None:
    answer = run("hub_fetch", **host.fetch(sources=[{"url": "ftp://x", "files": [{"path": "a"}]}]))
    assert answer["failed"]
    assert "wanted https://" in answer["msg"]


def test_fetch_without_room_for_the_merge_ends_at_once(host: Host, run: Run) -> None:
    utilities = importlib.import_module("ansible.module_utils.octoserve.fetch")
    size = sum(path.stat().st_size for path in host.splits)
    host.monkeypatch.setattr(utilities, "free_bytes", lambda folder: fetch_plan.RESERVE + size)
    answer = run("hub_fetch", check=True, **host.fetch())
    assert not answer.get("failed")
    answer = run("hub_fetch", check=True, **host.fetch(merge_later=[path.name for path in host.splits]))
    assert answer["failed"]
    assert "merging takes the size of the model once more" in answer["msg"]


# --- gguf_merge ------------------------------------------------------------------------------------


def test_merge_changes_once_even_where_the_splits_are_gone(host: Host, run: Run) -> None:
    run("hub_fetch", **host.fetch())
    first = run("gguf_merge", **host.merge(remove_splits=True))
    assert (first["changed"], first["adopted"]) == (True, False)
    assert sorted(path.name for path in host.dest.iterdir()) == ["receipt.json", "tiny.gguf"]
    again = run("gguf_merge", **host.merge(remove_splits=True))
    assert (again["changed"], again["needs_splits"], again["sha256"]) == (False, False, first["sha256"])


def test_merge_keeps_splits_unless_told(host: Host, run: Run) -> None:
    run("hub_fetch", **host.fetch())
    run("gguf_merge", **host.merge())
    assert (host.dest / host.splits[0].name).exists()
    checked = run("gguf_merge", check=True, **host.merge(remove_splits=True))
    assert checked["changed"]
    assert checked["diff"]["before"].count("split  /") == 3
    assert checked["diff"]["after"].count("split  /") == 0
    assert (host.dest / host.splits[0].name).exists()
    assert run("gguf_merge", **host.merge(remove_splits=True))["changed"]
    assert not (host.dest / host.splits[0].name).exists()


def test_merge_in_check_mode_needs_no_splits(host: Host, run: Run) -> None:
    answer = run("gguf_merge", check=True, **host.merge())
    assert answer["changed"]
    assert (answer["needs_splits"], answer["needs_room"]) == (True, True)
    assert answer["msg"] == f"would merge the splits into {host.dest}/tiny.gguf"
    assert not host.dest.exists()


def test_merge_is_not_current_for_other_splits(host: Host, run: Run) -> None:
    run("hub_fetch", **host.fetch())
    run("gguf_merge", **host.merge())
    other = host.merge()
    other["splits"][0]["sha256"] = "0" * 64
    assert run("gguf_merge", check=True, **other)["changed"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(Path.unlink, "found 2 of 3 files, missing tiny-00002", id="missing"),
        pytest.param(lambda path: os.truncate(path, 200), "truncated", id="truncated"),
        pytest.param(
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n"),
            "Git LFS pointer",
            id="lfs",
        ),
        pytest.param(
            lambda path: path.write_bytes(tiny_set(path.parent / "other", width=8)[1].read_bytes()),
            "belongs to another model",
            id="swapped",
        ),
    ],
)
def test_merge_refuses_bad_splits_before_it_starts(
    host: Host, run: Run, damage: Callable[[Path], object], message: str
) -> None:
    run("hub_fetch", **host.fetch())
    damage(host.dest / host.splits[1].name)
    answer = run("gguf_merge", **host.merge())
    assert answer["failed"]
    assert message in answer["msg"]
    assert "octoserve-job-merge-tiny.service" not in host.processes.running
    assert (host.dest / host.splits[0].name).exists()


def test_merge_refuses_a_split_that_is_not_the_verified_one(host: Host, run: Run) -> None:
    """The header of another quantization of the same model would pass; the digest does not."""
    run("hub_fetch", **host.fetch())
    split = host.dest / host.splits[1].name
    content = bytearray(split.read_bytes())
    content[-40] ^= 1
    split.write_bytes(content)
    answer = run("gguf_merge", **host.merge())
    assert answer["failed"]
    assert f"{split}: has no valid receipt" in answer["msg"]
    Receipt(host.dest).record(split.name, _sha(split))
    answer = run("gguf_merge", **host.merge())
    assert answer["failed"]
    assert f"{split}: sha256 is {_sha(split)}, wanted" in answer["msg"]


def test_merge_without_room_names_the_way_out(host: Host, run: Run) -> None:
    run("hub_fetch", **host.fetch())
    utilities = importlib.import_module("ansible.module_utils.octoserve.fetch")
    host.monkeypatch.setattr(utilities, "free_bytes", lambda folder: 1000)
    answer = run("gguf_merge", **host.merge())
    assert answer["failed"]
    assert "serve the splits without merging" in answer["msg"]


def test_merge_without_the_tool_says_so(host: Host, run: Run) -> None:
    run("hub_fetch", **host.fetch())
    answer = run("gguf_merge", **host.merge(tool="/nowhere/llama-gguf-split"))
    assert answer["failed"]
    assert "build it first" in answer["msg"]


def test_merge_adopts_by_digest_without_splits_and_elsewhere(host: Host, run: Run, tmp_path: Path) -> None:
    """A host set up by hand: the merged file lies in a folder of its own, the splits are long gone."""
    run("hub_fetch", **host.fetch())
    run("gguf_merge", **host.merge())
    theirs = tmp_path / "data" / "GLM.gguf"
    theirs.parent.mkdir()
    (host.dest / "tiny.gguf").replace(theirs)
    for path in host.splits:
        (host.dest / path.name).unlink()
    wanted = host.merge(output=str(theirs), receipt_dir=str(host.dest), sha256=_sha(theirs))
    checked = run("gguf_merge", check=True, **wanted)
    assert (checked["changed"], checked["needs_splits"], checked["needs_room"]) == (True, False, False)
    assert run("gguf_merge", **wanted)["adopted"]
    assert list(theirs.parent.iterdir()) == [theirs]
    assert Receipt(host.dest).valid(str(theirs)) is not None
    assert not run("gguf_merge", **wanted)["changed"]


def test_merge_leaves_a_foreign_file_alone(host: Host, run: Run) -> None:
    run("hub_fetch", **host.fetch())
    (host.dest / "tiny.gguf").write_bytes(b"mine")
    answer = run("gguf_merge", **host.merge())
    assert answer["failed"]
    assert "it was not changed" in answer["msg"]
    assert (host.dest / "tiny.gguf").read_bytes() == b"mine"


# --- gguf_info -------------------------------------------------------------------------------------


def test_info_reads_the_set_or_one_file(host: Host, run: Run) -> None:
    whole = run("gguf_info", path=str(host.splits[1]))["gguf"]
    assert (whole["splits"], whole["tensors"]) == (3, 6)
    one = run("gguf_info", path=str(host.splits[1]), whole_set=False)["gguf"]
    assert one["tensors"] == 2


def test_info_names_the_fault(host: Host, run: Run) -> None:
    host.splits[2].unlink()
    answer = run("gguf_info", path=str(host.splits[0]))
    assert answer["failed"]
    assert "missing tiny-00003-of-00003.gguf" in answer["msg"]
    assert "cannot be read" in run("gguf_info", path="/nowhere.gguf", whole_set=False)["msg"]


# --- the action plugin -----------------------------------------------------------------------------


class Controller:
    """The plugin with a module that gives prepared answers, a clock that its waits move, and a screen."""

    def __init__(self, answers: list[Any], monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
        plugin: Any = _plugin("long_job")
        self.answers, self.calls, self.screen, self.now = answers, list[Answer](), list[str](), 0.0
        monkeypatch.setattr(plugin.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(plugin.time, "sleep", self._sleep)
        monkeypatch.setattr(plugin.ActionBase, "run", lambda action, tmp, task_vars: {})
        self.action = plugin.ActionModule.__new__(plugin.ActionModule)
        self.action._task = SimpleNamespace(args=arguments, action="hub_fetch")
        self.action._display = SimpleNamespace(display=self.screen.append)
        self.action._execute_module = self._execute

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _execute(self, module_args: Answer, task_vars: Any) -> Answer:
        self.calls.append(dict(module_args))
        self.now += module_args["_job_wait"]
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def run(self) -> Answer:
        result: Answer = self.action.run(task_vars={"inventory_hostname": "gpu1"})
        return result


def _plugin(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "action_plugins" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _running(text: str, **more: Any) -> Answer:
    return {"changed": False, "finished": False, "job_run": "r1", "progress": {"text": text}, **more}


DONE: Answer = {"changed": True, "finished": True, "job_run": "r1", "progress": {"text": "done"}}


def test_plugin_calls_again_until_finished_and_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [_running("10 %", diff={"before": "a"}), _running("10 %"), _running("60 %"), DONE]
    controller = Controller(answers, monkeypatch, name="tiny")
    result = controller.run()
    assert result["changed"]
    assert result["diff"] == {"before": "a"}
    assert "job_run" not in result
    assert controller.screen == ["    gpu1 hub_fetch: 10 %", "    gpu1 hub_fetch: 60 %"]
    assert [call.get("_job_run") for call in controller.calls] == [None, "r1", "r1", "r1"]


def test_plugin_returns_what_needed_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller([{"changed": False, "finished": True}], monkeypatch)
    assert controller.run() == {"changed": False, "finished": True}
    assert len(controller.calls) == 1


def test_plugin_waits_longer_when_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller([*(_running(f"{n} %") for n in range(20)), DONE], monkeypatch)
    controller.run()
    waits = [call["_job_wait"] for call in controller.calls]
    assert (waits[0], waits[-1]) == (5.0, 20.0)


def test_plugin_survives_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [_running("1 %"), AnsibleConnectionFailure("gone"), AnsibleConnectionFailure("gone"), DONE]
    controller = Controller(answers, monkeypatch)
    assert controller.run()["changed"]
    assert "connection lost, the job runs on (2 of 10)" in controller.screen[2]


def test_plugin_gives_up_on_a_host_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller([_running("1 %"), AnsibleConnectionFailure("gone")], monkeypatch)
    with pytest.raises(AnsibleConnectionFailure):
        controller.run()
    assert len(controller.calls) == 12


def test_plugin_reports_a_host_that_was_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller([AnsibleConnectionFailure("gone")], monkeypatch)
    with pytest.raises(AnsibleConnectionFailure):
        controller.run()
    assert len(controller.calls) == 1


def test_plugin_ends_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller([_running("7 %")], monkeypatch, timeout=100)
    result = controller.run()
    assert result["failed"]
    assert "run the playbook again to attach. Last seen: 7 %" in result["msg"]


@pytest.mark.parametrize("name", ["hub_fetch", "gguf_merge", "release_install"])
def test_every_long_module_has_the_plugin(name: str) -> None:
    path = ROOT / "action_plugins" / f"{name}.py"
    assert path.resolve() == ROOT / "action_plugins" / "long_job.py"
