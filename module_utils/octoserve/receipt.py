"""Receipts of verified files, so that nothing hashes 402 GB twice.

`receipt.json` in a model's folder holds, for each file that was verified, its size, mtime, inode and
SHA-256, and for a merged file the SHA-256 of the splits that it was made from. An entry counts only while
size, mtime and inode are still those of the file: whoever changes or replaces a file voids its receipt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .job import read_state, write_json

NAME = "receipt.json"


@dataclass(frozen=True)
class Entry:
    """What was verified: bytes, nanoseconds, inode, hex digest; `made_from` maps split names to digests."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str
    made_from: dict[str, str] = field(default_factory=dict)


class Receipt:
    """The receipts of the files in one folder; names are relative to it, or absolute for files elsewhere."""

    def __init__(self, folder: Path) -> None:
        """Load receipt.json; one that is missing or damaged holds nothing."""
        self.folder = folder
        self.path = folder / NAME
        self._entries: dict[str, Entry] = {}
        files = read_state(self.path).get("files")
        for name, value in (files if isinstance(files, dict) else {}).items():
            entry = _entry(value)
            if entry:
                self._entries[name] = entry

    def valid(self, name: str) -> Entry | None:
        """Return the entry where the file is still the one that was verified."""
        entry = self._entries.get(name)
        try:
            found = (self.folder / name).stat()
        except OSError:
            return None
        if entry and (entry.size, entry.mtime_ns, entry.inode) == (found.st_size, found.st_mtime_ns, found.st_ino):
            return entry
        return None

    def record(self, name: str, sha256: str, made_from: Mapping[str, str] | None = None) -> Entry:
        """Write down a file that was just verified, and save."""
        found = (self.folder / name).stat()
        entry = Entry(found.st_size, found.st_mtime_ns, found.st_ino, sha256, dict(made_from or {}))
        self._entries[name] = entry
        self._save()
        return entry

    def forget(self, name: str) -> None:
        """Drop the entry of a file, and save."""
        if self._entries.pop(name, None):
            self._save()

    def _save(self) -> None:
        files = {name: asdict(entry) for name, entry in self._entries.items()}
        write_json(self.path, {"files": files}, durable=True)
        sync_folder(self.folder)


def receipt_name(path: Path, folder: Path) -> str:
    """Return the name of a file in the receipt of a folder: relative if it lies there, else absolute."""
    return path.name if path.parent == folder else str(path)


def _entry(value: Any) -> Entry | None:
    try:
        return Entry(**value)
    except TypeError:
        return None


def sync_folder(folder: Path) -> None:
    """Make renames in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
