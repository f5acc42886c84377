"""The sandbox host says in one line why it cannot be, and leaves nothing behind."""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "files/sandbox/nspawn_host.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nspawn_host", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nspawn_host = load()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return tmp_path / "hosts/demo"


def arguments(tree: Path, action: str, *more: str) -> list[str]:
    return [action, "--name=demo", f"--tree={tree}", "--timeout=20", *more]


def parsed(tree: Path, action: str, *more: str) -> argparse.Namespace:
    found: argparse.Namespace = nspawn_host.parse(arguments(tree, action, *more))
    return found


def error_of(tree: Path, action: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What the command line says, which must be an error."""
    assert nspawn_host.main(arguments(tree, action, *more)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sandbox: ")
    return err


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that could run a host, as far as the first checks go."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")


@pytest.mark.usefixtures("able")
def test_a_machine_that_is_not_linux(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "needs Linux, found Darwin" in error_of(tree, "start", capsys)


@pytest.mark.usefixtures("able")
def test_a_user_who_is_not_root(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root to boot a host: run as root, or give this user sudo" in error_of(tree, "start", capsys)


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    ("program", "package"), [("systemd-nspawn", "systemd-container"), ("mmdebstrap", "mmdebstrap")]
)
def test_a_program_that_is_missing(
    tree: Path, program: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else f"/usr/bin/{name}")
    assert f"{program} not found: apt-get install {package}" in error_of(tree, "make_base", capsys)


@pytest.mark.usefixtures("able")
def test_a_port_that_is_taken(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        err = error_of(tree, "start", capsys, "--address=127.0.0.1", f"--port={port}")
    assert f"127.0.0.1:{port} is taken by another program" in err
    assert "stop it, or give the sandbox host another address or port" in err


@pytest.mark.usefixtures("able")
def test_an_address_that_is_not_this_machines(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree.mkdir(parents=True)
    assert "cannot listen on 192.0.2.1:2222" in error_of(tree, "start", capsys, "--address=192.0.2.1")


@pytest.mark.usefixtures("able")
def test_a_tree_that_is_not_there(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before anything is started, and the operator is told what makes one."""
    err = error_of(tree, "start", capsys)
    assert f"{tree} is not there: make_tree makes it" in err
    assert not tree.parent.exists()


@pytest.mark.usefixtures("able")
def test_a_base_that_is_not_there(tree: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    err = error_of(tree, "make_tree", capsys, f"--base={tmp_path / 'gone.tar'}", f"--authorized-key={SCRIPT}")
    assert f"{tmp_path / 'gone.tar'} is not there: make_base makes it" in err
    assert not tree.exists()


@pytest.mark.usefixtures("able")
def test_a_base_that_cannot_be_made(
    tree: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/mmdebstrap"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor last; do :; done\necho half >"$last"\necho "E: no mirror" >&2\nexit 25\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    base = tmp_path / "cache/base.tar"
    assert "mmdebstrap ended with 25:\nE: no mirror" in error_of(tree, "make_base", capsys, f"--base={base}")
    assert list(base.parent.iterdir()) == []


@pytest.mark.usefixtures("able")
def test_what_is_there_is_not_made_again(tree: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = tmp_path / "base.tar"
    base.write_text("kept")
    tree.mkdir(parents=True)
    for action in ("make_base", "make_tree", "stop"):
        assert nspawn_host.main(arguments(tree, action, f"--base={base}")) == 0
        assert capsys.readouterr().out == "unchanged\n"
    assert base.read_text() == "kept"


def test_processes_are_found_by_their_root() -> None:
    assert os.getpid() in nspawn_host.processes_in(Path("/"))


def test_no_process_is_in_an_ordinary_folder(tmp_path: Path) -> None:
    assert nspawn_host.processes_in(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root directory")
def test_a_process_in_a_tree_is_found_and_ended(tree: Path) -> None:
    tree.mkdir(parents=True)
    code = "import os, sys; os.chroot(sys.argv[1]); print('there', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tree)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"there\n"
        assert nspawn_host.processes_in(tree) == [process.pid]
        assert nspawn_host.leader_of([process.pid]) is None, "it is no PID 1 of a host"
        assert nspawn_host.stop(parsed(tree, "stop")) is True
        assert process.wait() != 0
    assert nspawn_host.processes_in(tree) == []


def test_a_supervisor_is_seen_by_its_lock(tree: Path) -> None:
    tree.mkdir(parents=True)
    assert not nspawn_host.is_supervised(tree)
    with Path(f"{tree}.lock").open("w") as lock:
        assert not nspawn_host.is_supervised(tree)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert nspawn_host.is_supervised(tree)
        assert not nspawn_host.wait_until_empty(tree, 0.3)
    assert not nspawn_host.is_supervised(tree)
    assert nspawn_host.wait_until_empty(tree, 0.3)


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_ssh_is_known_by_its_greeting(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        code = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).accept()[0].sendall(sys.argv[2].encode())"
        command = [sys.executable, "-c", code, str(server.fileno()), greeting.decode()]
        with subprocess.Popen(command, pass_fds=[server.fileno()]):
            assert nspawn_host.answers_ssh(address, port) is greeting.startswith(b"SSH-")
    assert nspawn_host.answers_ssh(address, port) is False


@pytest.mark.parametrize("name", ["demo", "demo.example.org"])
def test_remove_takes_all_of_one_host_and_nothing_else(tmp_path: Path, name: str) -> None:
    tree = tmp_path / name
    for folder in (tree, tmp_path / f"{name}.partial", tmp_path / f"{name}2"):
        (folder / "etc").mkdir(parents=True)
    for file in (f"{name}.lock", f"{name}.console.log", f"{name}2.lock", "other.lock"):
        (tmp_path / file).write_text("")
    assert nspawn_host.remove(parsed(tree, "remove")) is True
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}2", f"{name}2.lock", "other.lock"]
    assert nspawn_host.remove(parsed(tree, "remove")) is False
