"""Findings about disks: room for what a deploy brings, and how fast the model's file can be read."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import fetch
from .finding import CANNOT_SEE, ERROR, OK, WARNING, Finding
from .splits import SPLIT_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

GB = 10**9
CHUNK = 8 << 20
MOST_BYTES = 256 << 20
LEAST_BYTES = 16 << 20
"""A file that is smaller says nothing about a disk's speed."""
MOST_SECONDS = 1.5
"""For writing and for reading each."""


@dataclass(frozen=True)
class Need:
    """Bytes that a deploy will still write below a path; None where they are not known."""

    what: str
    path: Path
    size: int | None


@dataclass(frozen=True)
class Model:
    """The model's files: where they lie, which they are, and the file that they are merged to (None: not merged).

    `linked` where files of a folder of the host become hard links, which take no room.
    """

    folder: Path
    files: tuple[fetch.Wanted, ...]
    merged: Path | None
    linked: bool = False

    @property
    def splits(self) -> tuple[fetch.Wanted, ...]:
        """Its GGUF files."""
        return tuple(item for item in self.files if item.name.endswith(".gguf"))

    @property
    def is_merged(self) -> bool:
        """Whether the merged file is there, so that its splits are not needed any more."""
        return self.merged is not None and self.merged.is_file()

    def size(self) -> int | None:
        """Bytes of the GGUF: what the profile says, else the files that are there; None while neither knows all."""
        if self.merged is not None and self.merged.is_file():
            return self.merged.stat().st_size
        found = [_size(item, self.folder) for item in self.splits]
        return sum(size for size in found if size is not None) if found and None not in found else None

    def needs(self) -> list[Need]:
        """What is still to be written, counted as the fetch and the merge count it."""
        left_out = {item.name for item in self.splits} if self.is_merged else set()
        plan = fetch.plan(self.folder, [item for item in self.files if item.name not in left_out])
        to_fetch = None if plan.unknown else plan.bytes_to_fetch
        needs = [Need("model files", self.folder, 0 if self.linked else to_fetch)]
        if self.merged is not None and not self.is_merged:
            needs.append(Need("merged model", self.merged.parent, self.size()))
        return needs


def merged_path(folder: Path, files: Iterable[fetch.Wanted]) -> Path | None:
    """The file beside the splits that they are merged to; None where the model is one file."""
    names = [match for match in (SPLIT_NAME.match(item.name) for item in files) if match]
    return folder / f"{names[0]['prefix']}.gguf" if len(names) > 1 else None


def room(needs: Iterable[Need], free: Callable[[Path], int] = fetch.free_bytes) -> list[Finding]:
    """One finding a file system: what is free on it against all that is to be written there."""
    by_device: dict[int, list[Need]] = {}
    for need in needs:
        by_device.setdefault(_nearest(need.path).stat().st_dev, []).append(need)
    return [_room(found, free(found[0].path)) for found in by_device.values()]


def speed(
    model: Model, start_timeout_s: float, *, may_write: bool, measure: Callable[[Path, int], Reading] | None = None
) -> Finding:
    """How fast the disk of the model's folder reads, against the time that a start has.

    Reads a part of the largest file there, past the page cache; where none is large enough and `may_write` is set,
    of a temporary file, which is removed.
    """
    name = "disk speed"
    size = model.size()
    wanted = "no bound while the model's size is not known"
    if size is not None:
        wanted = f"the model's {size / GB:.2f} GB within half of a start's {start_timeout_s:g} s"
    most = MOST_BYTES if size is None else min(MOST_BYTES, max(LEAST_BYTES, size))
    try:
        with _sample(model, most, may_write) as path:
            if path is None:
                measured = "no large file to read, and check mode writes none"
                return Finding(name, CANNOT_SEE, measured, wanted, "it is measured in a real run")
            reading = (measure or read_speed)(path, most)
    except OSError as error:
        return Finding(name, CANNOT_SEE, f"{model.folder}: {error.strerror}", wanted, "look at the disk by hand")
    measured = f"{reading.rate / GB:.2f} GB/s ({reading.size / 1e6:.0f} MB read"
    measured += " past the page cache)" if reading.direct else "; its file system has no way past the page cache)"
    if size is not None and size / reading.rate > start_timeout_s / 2:
        mend = "put octoserve_models_dir on a faster disk, or raise serve.start_timeout_s in the profile"
        return Finding(name, WARNING, f"{measured}, {size / reading.rate:.0f} s for the model", wanted, mend)
    return Finding(name, OK, measured, wanted)


@dataclass(frozen=True)
class Reading:
    """Bytes read and bytes a second; `direct` where the page cache was left out."""

    size: int
    rate: float
    direct: bool


def read_speed(path: Path, most: int, seconds: float = MOST_SECONDS) -> Reading:
    """Read the file from its start until so many bytes or seconds have passed. Raises OSError."""
    direct = True
    try:
        source = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system that does not know it, such as an older tmpfs
        direct = False
        source = os.open(path, os.O_RDONLY)
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        with mmap.mmap(-1, CHUNK) as buffer:  # aligned to pages, as O_DIRECT wants it
            done, start = 0, time.monotonic()
            while done < most and time.monotonic() - start < seconds:
                got = os.readv(source, [buffer])
                done += got
                if got < CHUNK:
                    break
            spent = max(time.monotonic() - start, 1e-6)
    finally:
        os.close(source)
    if not done:
        raise OSError(0, f"{path.name} gave nothing")
    return Reading(done, done / spent, direct)


@contextmanager
def _sample(model: Model, most: int, may_write: bool) -> Iterator[Path | None]:
    """A file to read: one of the model's, or a temporary one beside them, or none."""
    largest = max(_large_files(model), key=lambda path: path.stat().st_size, default=None)
    if largest is not None or not may_write:
        yield largest
        return
    folder = _nearest(model.folder)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".octoserve-disk-speed-") as file:
        block, start = os.urandom(CHUNK), time.monotonic()  # not zeros: a file system may compress
        while file.tell() < most and time.monotonic() - start < MOST_SECONDS:
            file.write(block)
            file.flush()
            os.fdatasync(file.fileno())
        yield Path(file.name)


def _large_files(model: Model) -> list[Path]:
    paths = [model.folder / item.name for item in model.files] + ([model.merged] if model.merged else [])
    found = []
    for path in paths:
        with suppress(OSError):
            if path.stat().st_size >= LEAST_BYTES:
                found.append(path)
    return found


def _room(needs: Sequence[Need], free: int) -> Finding:
    name = f"room at {_nearest(needs[0].path)}"
    known = sum(need.size for need in needs if need.size is not None)
    parts = ", ".join(f"{need.what} {need.size / GB:.2f} GB" for need in needs if need.size)
    measured = f"{free / GB:.2f} GB free"
    wanted = f"{(known + fetch.RESERVE) / GB:.2f} GB" + (f" ({parts})" if parts else " (nothing is missing)")
    if known + fetch.RESERVE > free:
        mend = "free space, or name a larger disk (octoserve_models_dir for the model)"
        return Finding(name, ERROR, measured, wanted, mend)
    unknown = ", ".join(need.what for need in needs if need.size is None)
    if unknown:
        mend = "put the files' sizes into the profile, or make sure by hand; the fetch checks it again"
        return Finding(name, CANNOT_SEE, measured, f"{wanted}, and {unknown}, whose size is not known yet", mend)
    return Finding(name, OK, measured, wanted)


def _size(item: fetch.Wanted, folder: Path) -> int | None:
    if item.size is not None:
        return item.size
    try:
        return (folder / item.name).stat().st_size
    except OSError:
        return None


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    while not path.exists():
        path = path.parent
    return path
