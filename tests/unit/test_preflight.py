"""Preflight as a whole: the module, the tasks that show its findings and end a run, and the JSON in the evidence."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from made_up_results import run as a_run
from made_up_results import task
from module_runner import Runner
from octoserve import evidence, preflight
from octoserve.finding import CANNOT_SEE, ERROR, OK, WARNING, Finding, Host, line, unless_hidden
from test_nvml import EIGHT_CARDS, compile_stub

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "templates/report.html.j2"
URL = "https://hub.example/org/repo/resolve/main"
VERSION = "{}.{}".format(*sys.version_info[:2])
GOOD = Finding("IOMMU", OK, "identity: card 0", "identity")
BAD = Finding("GPU count", ERROR, "7 cards in NVML", "8 cards", "look for it")


def test_a_finding_on_one_line() -> None:
    assert line(GOOD) == "ok:         IOMMU: identity: card 0"
    assert line(BAD) == "error:      GPU count: 7 cards in NVML. Wanted: 8 cards. To do: look for it"
    assert preflight.problems([GOOD, BAD]) == [line(BAD)]
    assert preflight.counts([GOOD, BAD, BAD]) == "2 errors, 0 warnings, 0 cannot be seen, 1 ok"


def test_only_what_is_good_is_taken_back_in_a_container() -> None:
    inside = Host(container="lxc")
    assert unless_hidden(GOOD, inside).verdict == CANNOT_SEE
    assert unless_hidden(BAD, inside) == BAD
    assert unless_hidden(GOOD, Host()) == GOOD


# --- the module ---------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def options(folder: Path, **changed: Any) -> dict[str, Any]:
    """What findings.yml hands over for a small model without cards."""
    return {
        "python": sys.executable,
        "python_version": VERSION,
        "model_dir": str(folder / "models/m"),
        "model_sources": [{"url": URL, "files": [{"path": "m.gguf", "size": 1000}]}],
        "model_prepare": "merge",
        "start_timeout": 600,
        "address": "127.0.0.1",
        "port": free_port(),
        "unit": "octoserve-test.service",
        "controller_time": time.time(),
        **changed,
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def by_name(answer: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in answer["findings"]}


def test_module_without_cards(run: Runner, tmp_path: Path) -> None:
    answer = run("preflight", **options(tmp_path))
    found = by_name(answer)
    assert answer["changed"] is False
    assert set(found) == {
        *("Python", "Python headers", "compiler", "shared memory", "RAM", "clock", "address"),
        *(f"room at {tmp_path}", "disk speed"),
    }, "nothing about cards"
    assert found["Python"]["verdict"] == OK
    assert found["address"]["verdict"] == OK
    assert len(answer["lines"]) == len(found)
    assert answer["ok"] == (not answer["problems"])
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_module_names_every_error_and_does_not_fail(run: Runner, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        disks = [{"what": "release", "path": str(tmp_path / "release"), "bytes": 10**18}]
        wanted = options(
            tmp_path, port=server.getsockname()[1], python_version="3.99", disks=disks, controller_time=0.0
        )
        answer = run("preflight", **wanted)
    assert not answer.get("failed")
    assert answer["ok"] is False
    errors = {name for name, finding in by_name(answer).items() if finding["verdict"] == ERROR}
    assert errors >= {"Python", "address", "clock", f"room at {tmp_path}"}
    assert len(answer["problems"]) == len(errors)
    assert all("To do: " in problem for problem in answer["problems"])


def test_module_in_check_mode_writes_nothing(run: Runner, tmp_path: Path) -> None:
    answer = run("preflight", check=True, **options(tmp_path))
    assert by_name(answer)["disk speed"]["verdict"] == CANNOT_SEE


def test_a_release_that_is_there_needs_no_room(run: Runner, tmp_path: Path) -> None:
    disks = [{"what": "release", "path": str(tmp_path), "bytes": 10**18}]
    assert by_name(run("preflight", **options(tmp_path, disks=disks)))[f"room at {tmp_path}"]["verdict"] == OK


def test_the_merged_file_may_lie_elsewhere(run: Runner, tmp_path: Path) -> None:
    splits = [{"path": f"m-0000{number}-of-00002.gguf", "size": 10**15} for number in (1, 2)]
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    wanted = options(tmp_path, model_sources=[{"url": URL, "files": splits}])
    assert by_name(run("preflight", **wanted))[f"room at {tmp_path}"]["verdict"] == ERROR
    answer = run("preflight", **wanted, model_merged=str(tmp_path / "mine.gguf"))
    assert by_name(answer)[f"room at {tmp_path}"]["verdict"] == OK


def test_module_refuses_sources_that_cannot_be_used(run: Runner, tmp_path: Path) -> None:
    sources = [{"url": "ftp://hub.example", "files": [{"path": "m.gguf"}]}]
    assert "ftp://hub.example" in run.error("preflight", **options(tmp_path, model_sources=sources))


# --- in the evidence ----------------------------------------------------------------------------------


def test_findings_lie_beside_the_report(tmp_path: Path) -> None:
    result = {"ok": True, "counts": "0 errors", "container": None, "findings": [{"name": "IOMMU"}], "lines": ["long"]}
    folder = evidence.write(a_run((task("preflight", "preflight"), result)), tmp_path, TEMPLATE)
    found = json.loads((folder / "raw/preflight.json").read_text())
    assert found == {"ok": True, "counts": "0 errors", "container": None, "findings": [{"name": "IOMMU"}]}
    assert "preflight" not in json.loads((folder / "summary.json").read_text())


def test_no_findings_no_file(tmp_path: Path) -> None:
    skipped = (task("preflight", "preflight", "skipped"), {"skipped": True, "ok": True})
    folder = evidence.write(a_run(skipped), tmp_path, TEMPLATE)
    assert not (folder / "raw/preflight.json").exists()


# --- the tasks, as Ansible runs them ------------------------------------------------------------------


def play(folder: Path, state: str, **changed: Any) -> tuple[subprocess.CompletedProcess[str], Path]:
    """playbooks/tasks/findings.yml on this machine, with the stub's cards; also the folder of the reports."""
    home = folder / "home"
    tools = home / "tools/bin/python"
    tools.parent.mkdir(parents=True)
    tools.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    tools.chmod(0o755)
    (folder / "state").write_text(state)
    (folder / "ansible.cfg").write_text("")
    octoserve = {
        "home": str(home),
        "models_dir": str(folder / "models"),
        "stacks_dir": str(ROOT / "files/patches"),
        "python": sys.executable,
        "host": "127.0.0.1",
        "port": free_port(),
        "instance": "test",
        "adopt_unit": "",
        "profile": {
            "stack": {"name": "vllm-0.32.0", "variant": "cuda"},
            "model": {"name": "m", "prepare": "merge", "sources": [{"url": URL, "files": [{"path": "m.gguf"}]}]},
            "serve": {"gpu": {"count": 8, "name": "RTX PRO", "memory_utilization": 0.95}, "start_timeout_s": 600},
        },
        **changed,
    }
    tasks = [{"name": "Findings", "ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/findings.yml")}]
    variables = {"octoserve_phase": "preflight", "octoserve_root": str(ROOT), "octoserve": octoserve}
    content = [{"hosts": "localhost", "gather_facts": False, "vars": variables, "tasks": tasks}]
    (folder / "play.yml").write_text(json.dumps(content))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
        "ANSIBLE_LIBRARY": str(ROOT / "library"),
        "ANSIBLE_MODULE_UTILS": str(ROOT / "module_utils"),
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "callback_plugins"),
        "ANSIBLE_CALLBACKS_ENABLED": "evidence",
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
        "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
        "OCTOSERVE_REPORTS": str(folder / "reports"),
        "OCTOSERVE_NVML_STUB": str(folder / "state"),
        "LD_LIBRARY_PATH": str(compile_stub(folder / "stub")),
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
        "NO_COLOR": "1",
    }
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", "-c", "local", "play.yml"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done, folder / "reports/localhost/latest/raw/preflight.json"


def test_all_findings_are_shown_and_then_every_error(tmp_path: Path) -> None:
    state = EIGHT_CARDS + "cards 7\npersistence * 0\ncuda_version 12080\n"
    done, written = play(tmp_path, state)
    assert done.returncode == 2, done.stdout + done.stderr
    shown, _, failed = done.stdout.partition("TASK [Nothing would fail later]")
    for words in ("warning:    persistence mode: off on cards 0, 1, 2, 3, 4, 5, 6", "ok:         ECC: "):
        assert words in shown
    for words in ("GPU count: 7 cards in NVML", "CUDA of the driver: driver 590.48.01 serves up to CUDA 12.8"):
        assert f"error:      {words}" in shown
        assert f"error:      {words}" in failed
    assert "CUDA 13.0 or newer, which the stack is built on" in failed, "taken from the stack's lock"
    assert "persistence mode" not in failed
    findings = {finding["name"]: finding for finding in json.loads(written.read_text())["findings"]}
    assert findings["GPU count"]["verdict"] == ERROR
    assert findings["persistence mode"]["verdict"] == WARNING


def test_a_profile_without_cards_hears_nothing_of_them(tmp_path: Path) -> None:
    profile = {
        "stack": {"name": "vllm-0.32.0", "variant": "cpu"},
        "model": {
            "name": "m",
            "prepare": "splits",
            "sources": [{"url": URL, "files": [{"path": "m.gguf", "size": 9}]}],
        },
        "serve": {"gpu": None, "start_timeout_s": 600},
    }
    done, written = play(tmp_path, "", profile=profile)
    names = {finding["name"] for finding in json.loads(written.read_text())["findings"]}
    assert "Python" in names, done.stdout
    assert not names & {"GPUs", "GPU count", "ECC", "IOMMU", "nvcc", "locked memory", "CUDA of the driver"}


def test_a_host_without_tools_is_left_alone(tmp_path: Path) -> None:
    done, written = play(tmp_path, EIGHT_CARDS, home=str(tmp_path / "empty"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not written.exists()
