"""SHA-256 of streams and files beside other work: hashlib lets other threads run while it hashes."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Union

#: Large enough that calls cost nothing, small enough to stay in the cache of the processor.
BLOCK = 1 << 20
#: So many blocks may wait to be hashed.
QUEUED = 8
Buffer = Union[bytes, bytearray, memoryview]


class Hasher:
    """Hashes in a thread of its own, at most a few blocks behind. Buffers must not change afterwards."""

    def __init__(self) -> None:
        """Start with the digest of nothing."""
        self._hash = hashlib.sha256()
        self._queue: queue.Queue[Buffer | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Hasher:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread."""
        self._finish()

    def update(self, data: Buffer) -> None:
        """Hand over a block; waits where hashing is behind."""
        self._queue.put(data)

    def hexdigest(self) -> str:
        """Return the digest of all that was handed over; nothing may follow."""
        self._finish()
        return self._hash.hexdigest()

    def _finish(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while True:
            data = self._queue.get()
            if data is None:
                return
            self._hash.update(data)


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the digest of a file, read once from start to end; `advance` is told of bytes as they pass."""
    digest = hashlib.sha256()
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file, memoryview(buffer) as view:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if advance:
                advance(count)
    return digest.hexdigest()


def buffers() -> Iterator[bytearray]:
    """Yield blocks in turn: enough that those queued and the one at work rest while the next is filled."""
    return cycle([bytearray(BLOCK) for _ in range(QUEUED + 2)])


def read_at(file: FileIO, buffer: bytearray, offset: int, count: int) -> None:
    """Fill the buffer's first `count` bytes from an offset of the file; raise EOFError where it ends before."""
    view, done = memoryview(buffer), 0
    while done < count:
        got = os.preadv(file.fileno(), [view[done:count]], offset + done)
        if not got:
            raise EOFError(f"{file.name!s}: ends at byte {offset + done}, wanted {offset + count}")
        done += got
