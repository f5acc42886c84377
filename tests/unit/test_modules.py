"""The faces of what runs without systemd: apply, apply again, check mode, diff, and what a failure says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import patch_stack
import pytest
import tiny_wheels
import yaml
from module_runner import Runner
from octoserve import deployment
from octoserve.digest import sha256_file

ROOT = Path(__file__).parents[2]
ONE = {"profile": "demo", "release": "engine-1"}
TWO = {"profile": "demo", "release": "engine-2"}
UNIT = "octoserve-test.service"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return Runner(monkeypatch, capsys)


def stack_folder(folder: Path, lock: Path) -> Path:
    stack = patch_stack.write_series(folder / "engine-1.2")
    (stack / "cpu.txt").write_text(lock.read_text())
    variant = {"python": "3.11", "requirements": "cpu.txt", "imports": ["engine"]}
    (stack / "stack.yml").write_text(yaml.safe_dump({"name": "engine-1.2", "variants": {"cpu": variant}}))
    return stack


# --- wheelhouse, tools_venv, and all of them once as Ansible runs them -------------------------------


def play(folder: Path, taken: int) -> list[dict[str, Any]]:
    """Each module once, packed and sent as to a host."""
    lock = tiny_wheels.lock(folder / "lock.txt", [tiny_wheels.greeter(folder / "links")])
    made = folder / "made.tar.gz"
    made.write_bytes(b"an archive")
    options: dict[str, dict[str, Any]] = {
        "wheelhouse": {
            "name": "tools-1.0",
            "requirements": str(lock),
            "path": str(folder / "wheelhouses"),
            "python_version": "3.11",
        },
        "tools_venv": {
            "path": str(folder / "tools"),
            "python": sys.executable,
            "requirements": lock.read_text(),
            "archive": "{{ wheelhouse.archive }}",
        },
        "stack_info": {"path": str(stack_folder(folder, lock)), "variant": "cpu"},
        "source_archive": {
            "kind": "archive",
            "url": str(made),
            "version": "1",
            "sha256": sha256_file(made),
            "path": str(folder / "sources"),
        },
        "deployment": {"path": str(folder / "deployments"), "state": "recorded", "content": ONE},
        "port_free": {"address": "127.0.0.1", "port": taken, "unit": UNIT},
    }
    return [
        {"name": module, module: options[module], "register": module, "ignore_errors": module == "port_free"}
        for module in options
    ]


def test_ansible_runs_them(tmp_path: Path, run: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        tasks = play(tmp_path, server.getsockname()[1])
        content = "{{ {" + ", ".join(f"'{task['name']}': {task['name']}" for task in tasks) + "} | to_json }}"
        results_file = tmp_path / "results.json"
        tasks.append({"name": "Keep", "ansible.builtin.copy": {"content": content, "dest": str(results_file)}})
        (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
        (tmp_path / "ansible.cfg").write_text("")  # the project's own would write evidence
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
            "ANSIBLE_LIBRARY": str(ROOT / "library"),
            "ANSIBLE_MODULE_UTILS": str(ROOT / "module_utils"),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
            "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
            "PIP_FIND_LINKS": str(tmp_path / "links"),
        }
        command = [str(Path(sys.executable).with_name("ansible-playbook")), str(tmp_path / "play.yml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(results_file.read_text())
    assert results["wheelhouse"]["wheels"] == 1
    greet = subprocess.run([str(tmp_path / "tools/bin/greet")], capture_output=True, text=True, check=True)
    assert greet.stdout == "hello from 1.0\n"
    assert results["stack_info"]["release"].startswith("engine-1.2-cpu-")
    assert Path(results["source_archive"]["archive"]).read_bytes() == b"an archive"
    assert (results["deployment"]["number"], results["deployment"]["current"]) == (1, None)
    assert f"PID {os.getpid()}" in results["port_free"]["msg"]

    # A second time there is nothing to do.
    archive = results["wheelhouse"]["archive"]
    for task in tasks[:5]:
        options = {**task[task["name"]], **({"archive": archive} if task["name"] == "tools_venv" else {})}
        assert not run.changed(task["name"], **options), task["name"]


def test_check_mode_makes_nothing(tmp_path: Path, run: Runner) -> None:
    lock = tiny_wheels.lock(tmp_path / "lock.txt", [tiny_wheels.greeter(tmp_path / "links")])
    out = tmp_path / "out"
    options = {"name": "tools", "requirements": str(lock), "path": str(out), "python_version": "3.11"}
    planned = run("wheelhouse", check=True, **options)
    assert planned["changed"]
    assert planned["file_name"].startswith("tools-")
    text = lock.read_text()
    answer = run("tools_venv", check=True, path=str(out / "tools"), python=sys.executable, requirements=text)
    assert answer["changed"]
    assert answer["diff"] == {"before": "", "after": "greeter==1.0\n"}
    assert not out.exists()


def test_what_is_no_lock_is_refused(tmp_path: Path, run: Runner) -> None:
    (tmp_path / "lock.txt").write_text("greeter>=1.0\n")
    options = {"name": "tools", "requirements": str(tmp_path / "lock.txt"), "path": str(tmp_path)}
    assert "greeter>=1.0" in run.error("wheelhouse", python_version="3.11", **options)
    options = {"path": str(tmp_path / "tools"), "python": sys.executable}
    assert "greeter>=1.0" in run.error("tools_venv", requirements="greeter>=1.0\n", **options)
    assert not (tmp_path / "tools").exists()


@pytest.mark.parametrize("content", [b"\xff\xfe", None], ids=["binary", "absent"])
def test_a_lock_that_cannot_be_read_is_named(tmp_path: Path, run: Runner, content: bytes | None) -> None:
    lock = tmp_path / "lock.txt"
    if content is not None:
        lock.write_bytes(content)
    options = {"name": "tools", "requirements": str(lock), "path": str(tmp_path), "python_version": "3.11"}
    assert str(lock) in run.error("wheelhouse", **options)


# --- stack_info, source_archive ----------------------------------------------------------------------


def test_a_stack_is_described(tmp_path: Path, run: Runner) -> None:
    lock = tiny_wheels.lock(tmp_path / "lock.txt", [tiny_wheels.greeter(tmp_path)])
    folder = stack_folder(tmp_path, lock)
    found = run("stack_info", path=str(folder), variant="cpu")
    assert (found["stack"], found["python"], found["imports"]) == ("engine-1.2", "3.11", ["engine"])
    assert found["requirements"] == str(folder / "cpu.txt")
    assert found["files"] == ["cpu.txt", "series.yml", *sorted(path.name for path in folder.glob("*.patch"))]
    assert "no variant 'rocm'; it has: cpu" in run.error("stack_info", path=str(folder), variant="rocm")
    (folder / "stack.yml").write_text("variants: [")
    assert "stack engine-1.2: " in run.error("stack_info", path=str(folder), variant="cpu")


def test_a_source_is_kept_right(tmp_path: Path, run: Runner) -> None:
    made = tmp_path / "made.tar.gz"
    made.write_bytes(b"an archive")
    options = {"kind": "archive", "url": str(made), "version": "1", "path": str(tmp_path / "sources")}
    right = {**options, "sha256": sha256_file(made)}
    planned = run("source_archive", check=True, **right)
    assert (planned["changed"], planned["sha256"]) == (True, right["sha256"])
    assert not (tmp_path / "sources").exists()
    fetched = run("source_archive", **right)
    assert (fetched["changed"], fetched["sha256"]) == (True, right["sha256"])
    assert fetched["archive"] == planned["archive"]
    assert not run.changed("source_archive", **right)

    Path(fetched["archive"]).write_bytes(b"damaged since")
    planned = run("source_archive", check=True, **right)
    assert (planned["changed"], planned["sha256"]) == (True, right["sha256"])
    mended = run("source_archive", **right)
    assert (mended["changed"], mended["sha256"]) == (True, right["sha256"])
    assert f"wanted {'0' * 64}" in run.error("source_archive", **options, sha256="0" * 64)


# --- deployment --------------------------------------------------------------------------------------


def test_a_deployment_is_recorded_once(tmp_path: Path, run: Runner) -> None:
    folder = tmp_path / "deployments"
    options = {"path": str(folder), "state": "recorded", "content": ONE}
    planned = run("deployment", check=True, **options)
    assert not folder.exists()
    assert run("deployment", path=str(folder), state="running")["number"] is None
    made = run("deployment", **options)
    assert (planned["changed"], planned["number"], planned["diff"]) == (made["changed"], made["number"], made["diff"])
    assert (made["changed"], made["number"]) == (True, 1)
    assert (made["diff"]["before"], made["diff"]["after"]) == ({}, ONE)
    assert not run.changed("deployment", **options)

    other = {**options, "content": TWO}
    assert run("deployment", check=True, **other)["number"] == 2
    second = run("deployment", **other)
    assert (second["number"], second["diff"]["before"], second["diff"]["after"]) == (2, ONE, TWO)
    assert run("deployment", path=str(folder), state="running")["number"] == 2
    assert json.loads((folder / "0001/deployment.json").read_text()) == ONE


def test_a_way_back_retires_what_came_later(tmp_path: Path, run: Runner) -> None:
    where = {"path": str(tmp_path)}
    assert run("deployment", state="chosen", **where)["number"] is None, "nothing has passed yet"
    for number, content in enumerate((ONE, TWO, ONE), 1):
        run("deployment", state="recorded", content=content, **where)
        run("deployment", state="passed", number=number, **where)
    run("deployment", state="failed", number=3, **where)
    planned = run("deployment", check=True, state="chosen", number=1, **where)
    assert run("deployment", state="running", **where)["number"] == 2, "what failed is out of service"
    back = run("deployment", state="chosen", number=1, **where)
    assert (planned["changed"], planned["diff"]) == (back["changed"], back["diff"]) == (True, back["diff"])
    assert back["diff"] == {"before": {"1": "passed", "2": "passed"}, "after": {"1": "passed", "2": "retired"}}
    assert (back["content"], back["current"]) == (ONE, 3), "current moves when the gates have passed"
    assert run("deployment", state="running", **where)["number"] == 1
    assert not run.changed("deployment", state="chosen", number=1, **where)
    anew = run("deployment", state="recorded", content=ONE, **where)
    assert (anew["changed"], anew["number"], anew["reached"]) == (True, 3, "failed")
    assert run("deployment", state="running", **where)["number"] == 3, "what is tried again is in service again"


def test_only_what_passed_is_current(tmp_path: Path, run: Runner) -> None:
    for content in (ONE, TWO):
        assert run.changed("deployment", path=str(tmp_path), state="recorded", content=content)
    options = {"path": str(tmp_path), "state": "passed", "number": 1}
    planned = run("deployment", check=True, **options)
    assert (planned["changed"], planned["current"]) == (True, None), "check mode changes nothing"
    passed = run("deployment", **options)
    assert passed["diff"] == planned["diff"]
    assert passed["diff"]["before"] == {"state": "recorded", "current": None}
    assert passed["diff"]["after"] == {"state": "passed", "current": 1}
    assert not run.changed("deployment", **options)

    again = run("deployment", path=str(tmp_path), state="recorded", content=TWO)
    assert (again["changed"], again["reached"]) == (False, "recorded")
    failed = run("deployment", path=str(tmp_path), state="failed", number=2)
    assert (failed["changed"], failed["current"]) == (True, 1)
    assert failed["diff"]["after"] == {"state": "failed", "current": 1}
    assert str((tmp_path / "current").readlink()) == "0001"
    again = run("deployment", path=str(tmp_path), state="recorded", content=TWO)
    assert (again["changed"], again["reached"]) == (True, "failed"), "what failed is not taken for what passed"


@pytest.mark.parametrize("state", ["failed", "retired"])
def test_what_went_out_of_service_while_its_gates_ran_does_not_pass(tmp_path: Path, run: Runner, state: str) -> None:
    number = run("deployment", path=str(tmp_path), state="recorded", content=ONE)["number"]
    deployment.set_state(tmp_path, number, state)
    for check in (False, True):
        answer = run("deployment", check, path=str(tmp_path), state="passed", number=number)
        assert f"is {state} since its gates began" in answer["msg"]
    assert (deployment.current(tmp_path), deployment.state(tmp_path, number)) == (None, state)


def test_a_deployment_that_is_not_there_does_not_pass(tmp_path: Path, run: Runner) -> None:
    assert "0009/deployment.json" in run.error("deployment", path=str(tmp_path), state="passed", number=9)
    assert not (tmp_path / "current").is_symlink()
    assert "content" in run.error("deployment", path=str(tmp_path), state="recorded")


# --- release_install, llama_build: as far as no job is needed ----------------------------------------


def test_a_release_that_is_complete_is_left_alone(tmp_path: Path, run: Runner) -> None:
    options = {"path": str(tmp_path), "python": sys.executable, "stack": "/nowhere", "requirements": "cpu.txt"}
    planned = run("release_install", check=True, name="new", **options)
    assert (planned["changed"], planned["diff"]["after"]) == (True, f"{tmp_path / 'new'}\n")
    for name, text in {"complete": '{"release": "complete"}', "damaged": '{"release": '}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "release.json").write_text(text)
    found = run("release_install", name="complete", **options)
    assert (found["changed"], found["record"]) == (False, {"release": "complete"})
    assert f"remove {tmp_path / 'damaged'} and run again" in run.error("release_install", name="damaged", **options)


def test_a_tool_of_that_source_is_left_alone(tmp_path: Path, run: Runner) -> None:
    tool = tmp_path / "1.0/bin/llama-gguf-split"
    tool.parent.mkdir(parents=True)
    tool.write_text("the tool")
    (tmp_path / "1.0/source.sha256").write_text("0" * 64 + "\n")
    options = {"archive": "/nowhere.tar.gz", "path": str(tmp_path / "1.0")}
    found = run("llama_build", sha256="0" * 64, **options)
    assert (found["changed"], found["tool"]) == (False, str(tool))
    assert run.changed("llama_build", check=True, sha256="1" * 64, **options)


# --- port_free ---------------------------------------------------------------------------------------


def test_a_port_is_free_or_whoever_has_it_is_named(run: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"PID {os.getpid()}" in run.error("port_free", address="127.0.0.1", port=port, unit=UNIT)
    found = run("port_free", address="127.0.0.1", port=port, unit=UNIT)
    assert (found["changed"], found["held_by_unit"]) == (False, False)
    assert run.error("port_free", address="127.0.0.1", port=70000, unit=UNIT) == "port is 70000, wanted 1 to 65535"
    assert "cannot listen on 192.0.2.1" in run.error("port_free", address="192.0.2.1", port=port, unit=UNIT)
