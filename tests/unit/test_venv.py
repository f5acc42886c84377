"""A virtual environment is whole, in its place, and exactly its lock; or the one before it stays."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_wheels
from octoserve import venv
from octoserve.venv import Source, VenvError

UV = str(Path(sys.executable).with_name("uv"))


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str], Source]:
    """Makes the lock and the wheelhouse of one version of the greeter."""

    def make(version: str) -> Source:
        made = tiny_wheels.greeter(tmp_path / "wheels", version)
        lock = tiny_wheels.lock(tmp_path / f"lock-{version}.txt", [made])
        return Source(lock, tiny_wheels.pack(tmp_path / f"wheels-{version}.tar", [made]))

    return make


def says(script: Path) -> str:
    return subprocess.run([script], capture_output=True, text=True, check=True).stdout.strip()


def text_of_scripts(path: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in (path / "bin").iterdir() if not file.is_symlink())


@pytest.mark.parametrize("uv", [UV, None], ids=["uv", "pip"])
def test_an_environment_works_in_its_place(uv: str | None, source: Callable[[str], Source], tmp_path: Path) -> None:
    path, found = tmp_path / "tools", source("1.0")
    leftover = tmp_path / ".tools.partial/bin"  # of a killed run
    leftover.mkdir(parents=True)
    venv.make(path, sys.executable, found, uv)
    assert venv.is_installed(path, venv.digest(found.lock))
    assert says(path / "bin/greet") == "hello from 1.0"
    assert ".tools.partial" not in text_of_scripts(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "lock-1.0.txt",
        "tools",
        "wheels",
        "wheels-1.0.tar",
    ]
    assert [file.name for file in path.iterdir() if file.name in {".wheels", ".uv-cache"}] == []


def test_another_lock_is_not_installed(source: Callable[[str], Source], tmp_path: Path) -> None:
    path, old, new = tmp_path / "tools", source("1.0"), source("1.1")
    assert not venv.is_installed(path, venv.digest(old.lock))
    venv.make(path, sys.executable, old, UV)
    assert not venv.is_installed(path, venv.digest(new.lock))
    venv.make(path, sys.executable, new, UV)
    assert says(path / "bin/greet") == "hello from 1.1"
    assert venv.is_installed(path, venv.digest(new.lock))


def test_a_failed_install_leaves_the_environment_that_was(source: Callable[[str], Source], tmp_path: Path) -> None:
    path, old = tmp_path / "tools", source("1.0")
    venv.make(path, sys.executable, old, UV)
    with pytest.raises(VenvError, match="greeter"):
        venv.make(path, sys.executable, Source(source("1.1").lock, old.archive), UV)
    assert says(path / "bin/greet") == "hello from 1.0"
    assert venv.is_installed(path, venv.digest(old.lock))


def test_a_wheel_that_is_not_the_locks_is_refused(source: Callable[[str], Source], tmp_path: Path) -> None:
    found = source("1.0")
    changed = tiny_wheels.wheel(tmp_path / "changed", "greeter", "1.0", {"greeter.py": "import evil\n"})
    tiny_wheels.pack(tmp_path / "wheels-1.0.tar", [changed])
    with pytest.raises(VenvError, match=r"(?i)hash"):
        venv.make(tmp_path / "tools", sys.executable, found, UV)
    assert not (tmp_path / "tools").exists()


def test_an_archive_that_is_no_wheelhouse_is_named(source: Callable[[str], Source], tmp_path: Path) -> None:
    lock = source("1.0").lock
    outside = tmp_path / "outside.tar"
    with tarfile.open(outside, "w") as tar:
        tar.add(lock, arcname="../outside.txt")
    with pytest.raises(VenvError, match=r"holds '\.\./outside\.txt'"):
        venv.create(tmp_path / "tools", sys.executable, Source(lock, outside), UV)


def test_a_damaged_archive_is_named(source: Callable[[str], Source], tmp_path: Path) -> None:
    found = source("1.0")
    assert found.archive is not None
    found.archive.write_bytes(found.archive.read_bytes()[:700])
    with pytest.raises(VenvError, match=r"wheels-1\.0\.tar"):
        venv.create(tmp_path / "tools", sys.executable, found, UV)


def test_an_interpreter_that_does_not_work_is_named(source: Callable[[str], Source], tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named venv' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(VenvError, match=r"ended with 3: No module named venv"):
        venv.make(tmp_path / "tools", str(broken), source("1.0"))


def test_without_an_archive_the_index_is_asked(
    source: Callable[[str], Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = source("1.0").lock
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_DEFAULT_INDEX", tiny_wheels.index(tmp_path / "index", []))
    further = tiny_wheels.index(tmp_path / "further", [tmp_path / "wheels/greeter-1.0-py3-none-any.whl"])
    with pytest.raises(VenvError, match="greeter"):
        venv.make(tmp_path / "tools", sys.executable, Source(lock), UV)
    venv.make(tmp_path / "tools", sys.executable, Source(lock, None, (further,)), UV)
    assert says(tmp_path / "tools/bin/greet") == "hello from 1.0"


def test_a_further_index_with_another_version_hides_nothing(
    source: Callable[[str], Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = source("1.0").lock
    source("0.9")
    wheels = tmp_path / "wheels"
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv(
        "UV_DEFAULT_INDEX", tiny_wheels.index(tmp_path / "index", [wheels / "greeter-1.0-py3-none-any.whl"])
    )
    further = tiny_wheels.index(tmp_path / "further", [wheels / "greeter-0.9-py3-none-any.whl"])
    venv.make(tmp_path / "tools", sys.executable, Source(lock, None, (further,)), UV)
    assert says(tmp_path / "tools/bin/greet") == "hello from 1.0"
