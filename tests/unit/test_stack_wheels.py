"""Wheels are fetched by the lock's hashes, and only Python files are kept."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
import stack_wheels
import tiny_wheels
from octoserve import stack, wheelhouse

FILES = {"engine/core.py": "x = 1\n", "engine/_C.abi3.so": "binary", "engine/table.json": "{}\n"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an index with `engine` and `other`, the only one that pip is told of."""
    made = [
        tiny_wheels.wheel(tmp_path, "engine", "1.2", FILES),
        tiny_wheels.wheel(tmp_path, "other", "2.0", {"other.py": "\n"}),
    ]
    url = tiny_wheels.index(tmp_path / "index", made)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    tiny_wheels.lock(tmp_path / "cpu.txt", made)
    return url


def variant(folder: Path) -> stack.Variant:
    return stack.Variant("engine-1.2", "cpu", "3.11", folder / "cpu.txt", (), ("engine",))


def test_the_wheels_asked_for_come_as_their_python_files(index: str, tmp_path: Path) -> None:
    wheels = stack_wheels.fetch(variant(tmp_path), ["engine", "engine-cpu"], tmp_path / "cache")
    assert [wheel.name for wheel in wheels] == ["engine-1.2-py3-none-any.whl"]
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    assert {"engine/core.py", "engine-1.2.dist-info/METADATA"} <= names
    assert not names & {"engine/_C.abi3.so", "engine/table.json"}
    stack_wheels.unpack(wheels, tmp_path / "site")
    assert (tmp_path / "site/engine/core.py").read_text() == "x = 1\n"


def test_they_are_fetched_once(index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stack_wheels.fetch(variant(tmp_path), ["engine"], tmp_path / "cache")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "nowhere").as_uri())
    assert stack_wheels.fetch(variant(tmp_path), ["engine"], tmp_path / "cache") == first


def test_another_file_than_the_locked_one_is_refused(index: str, tmp_path: Path) -> None:
    found = hashlib.sha256((tmp_path / "engine-1.2-py3-none-any.whl").read_bytes()).hexdigest()
    lock = tmp_path / "cpu.txt"
    lock.write_text(lock.read_text().replace(found, "0" * 64))
    with pytest.raises(wheelhouse.WheelhouseError, match=found):
        stack_wheels.fetch(variant(tmp_path), ["engine"], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_lock_without_the_distributions_is_refused(index: str, tmp_path: Path) -> None:
    with pytest.raises(wheelhouse.WheelhouseError, match="locks none of plugin"):
        stack_wheels.fetch(variant(tmp_path), ["plugin"], tmp_path / "cache")
