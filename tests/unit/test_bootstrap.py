"""A machine becomes a controller, or is told in one line what it lacks; what is done is not done again."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_wheels

ROOT = Path(__file__).parents[2]
#: What the script calls that every machine has.
ALWAYS = ("bash", "env", "dirname", "sha256sum", "cat")
#: What it looks for, because the sandbox and the tests need it.
NEEDED = ("mmdebstrap", "systemd-nspawn", "ssh", "gcc", "git")


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script in a checkout of its own, with a lock of one tiny wheel."""
    folder = tmp_path / "check out"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/bootstrap.sh", folder / "scripts")
    tiny_wheels.lock(folder / "requirements/controller.txt", [tiny_wheels.greeter(tmp_path / "wheels")])
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH of a machine that has everything, on which nothing can be installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ALWAYS:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    for name in NEEDED:
        program(folder, name, "exit 1")
    program(folder, "uname", "echo Linux")
    program(folder, "id", "echo 0")
    program(folder, "apt-get", f"echo \"$@\" >>'{tmp_path}/apt-get.args'")
    (folder / "python3").symlink_to(sys.executable)
    return folder


def bootstrap(checkout: Path, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    wheels = checkout.parent / "wheels"
    environment = {
        "PATH": str(path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": "/dev/null",
    }
    command = [str(checkout / "scripts/bootstrap.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=path)


def a_venv(checkout: Path) -> Path:
    """A .venv whose Python writes down what it is asked for."""
    folder = checkout / ".venv/bin"
    folder.mkdir(parents=True)
    program(folder, "python", f"echo \"$@\" >>'{checkout}/python.args'")
    return checkout / "python.args"


def test_an_unknown_name_lists_the_known(checkout: Path, path: Path) -> None:
    done = bootstrap(checkout, path, "contoller")
    assert done.returncode == 1
    assert done.stderr == "bootstrap: requirements/contoller.txt not found; wanted: controller.txt\n"


def test_without_a_name_the_usage_is_shown(checkout: Path, path: Path) -> None:
    done = bootstrap(checkout, path)
    assert done.returncode != 0
    assert "usage: scripts/bootstrap.sh controller|test" in done.stderr


def test_another_system_is_named(checkout: Path, path: Path) -> None:
    program(path, "uname", "echo Darwin")
    done = bootstrap(checkout, path, "controller")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "found Darwin, wanted Linux" in done.stderr


def test_an_old_python_is_named(checkout: Path, path: Path) -> None:
    (path / "python3").unlink()
    program(path, "python3", '[ "$1" = --version ] && echo Python 3.10.12; exit 1')
    done = bootstrap(checkout, path, "controller")
    assert done.returncode == 1
    assert "found Python 3.10.12, wanted Python 3.11 or newer" in done.stderr


def test_a_newer_python_beside_an_old_one_is_taken(checkout: Path, path: Path) -> None:
    asked = a_venv(checkout)
    (path / "python3.12").symlink_to(sys.executable)
    (path / "python3").unlink()
    program(path, "python3", "exit 1")
    assert bootstrap(checkout, path, "controller").returncode == 0
    assert "--require-hashes" in asked.read_text()


def test_a_user_without_sudo_is_told(checkout: Path, path: Path) -> None:
    (path / "mmdebstrap").unlink()
    program(path, "id", "echo 1000")
    done = bootstrap(checkout, path, "controller")
    assert done.returncode == 1
    assert "mmdebstrap" in done.stderr
    assert "run as root, or install sudo" in done.stderr


def test_a_machine_without_apt_is_told(checkout: Path, path: Path) -> None:
    (path / "systemd-nspawn").unlink()
    (path / "apt-get").unlink()
    done = bootstrap(checkout, path, "controller")
    assert done.returncode == 1
    assert "needs systemd-container" in done.stderr


def test_only_what_is_missing_is_installed(checkout: Path, path: Path) -> None:
    a_venv(checkout)
    (path / "git").unlink()
    (path / "ssh").unlink()
    assert bootstrap(checkout, path, "controller").returncode == 0
    installed = (checkout.parent / "apt-get.args").read_text().splitlines()[-1].split()
    packages = set(installed[installed.index("--no-install-recommends") + 1 :])
    # The keyring is a file; whether this machine has it is not this test's to say.
    assert packages - {"debian-archive-keyring"} == {"git", "openssh-client"}


def test_the_environment_follows_its_lock(checkout: Path, path: Path) -> None:
    asked, lock = a_venv(checkout), checkout / "requirements/controller.txt"
    assert bootstrap(checkout, path, "controller").returncode == 0
    assert "--requirement requirements/controller.txt" in asked.read_text()
    stamp = (checkout / ".venv/controller.sha256").read_text()
    assert stamp.startswith(hashlib.sha256(lock.read_bytes()).hexdigest())
    asked.unlink()
    assert bootstrap(checkout, path, "controller").stdout == ""
    assert not asked.exists(), "nothing to do"
    lock.write_text(lock.read_text() + "# changed\n")
    assert bootstrap(checkout, path, "controller").returncode == 0
    assert asked.exists()


def test_a_failed_installation_is_tried_again(checkout: Path, path: Path) -> None:
    a_venv(checkout)
    program(checkout / ".venv/bin", "python", "exit 3")
    assert bootstrap(checkout, path, "controller").returncode == 3
    asked = checkout / "python.args"
    program(checkout / ".venv/bin", "python", f"echo \"$@\" >>'{asked}'")
    assert bootstrap(checkout, path, "controller").returncode == 0
    assert asked.exists()
