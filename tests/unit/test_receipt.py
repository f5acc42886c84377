"""Receipts count only while the file is the one that was verified."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from octoserve.receipt import Receipt, receipt_name

DIGEST = "a" * 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 100)
    return path


def test_recorded_file_is_valid_for_the_next_reader(file: Path) -> None:
    Receipt(file.parent).record(file.name, DIGEST, {"a-00001-of-00001.gguf": "b" * 64})
    entry = Receipt(file.parent).valid(file.name)
    assert entry is not None
    assert (entry.size, entry.sha256) == (100, DIGEST)
    assert entry.made_from == {"a-00001-of-00001.gguf": "b" * 64}


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"y")
    os.utime(path, ns=(0, path.stat().st_mtime_ns))


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _replace(path: Path) -> None:
    """Another file of the same size and time, as rsync --times leaves it."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"z" * 100)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [_grow, _touch, _replace, Path.unlink])
def test_changed_file_voids_its_receipt(file: Path, change: object) -> None:
    Receipt(file.parent).record(file.name, DIGEST)
    change(file)  # type: ignore[operator]
    assert Receipt(file.parent).valid(file.name) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": 3}', '{"files": {"model.gguf": {"size": 1}}}'])
def test_damaged_receipt_holds_nothing(file: Path, content: str) -> None:
    (file.parent / "receipt.json").write_text(content)
    receipt = Receipt(file.parent)
    assert receipt.valid(file.name) is None
    receipt.record(file.name, DIGEST)
    assert Receipt(file.parent).valid(file.name) is not None


def test_forgotten_file_is_gone_and_others_stay(file: Path) -> None:
    other = file.with_name("other.gguf")
    other.write_bytes(b"o")
    receipt = Receipt(file.parent)
    receipt.record(file.name, DIGEST)
    receipt.record(other.name, DIGEST)
    receipt.forget(file.name)
    assert Receipt(file.parent).valid(file.name) is None
    assert Receipt(file.parent).valid(other.name) is not None


def test_file_elsewhere_is_known_by_its_path(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "receipts"
    folder.mkdir()
    name = receipt_name(file, folder)
    assert name == str(file)
    Receipt(folder).record(name, DIGEST)
    assert Receipt(folder).valid(name) is not None
    assert receipt_name(folder / "a", folder) == "a"
