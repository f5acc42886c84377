"""Verifies a merged file that somebody else made, where the splits are not on the host.

The tensors of a split lie unchanged in the merged file. So the SHA-256 of a split follows from its header, a few
megabytes from the hub, and from bytes that are here already. Where it is the right one for every split, the merged file
holds all of the model, and nothing of its 402 GB was fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from .digest import BLOCK, Hasher, buffers, read_at
from .fetch import Wanted
from .gguf import Gguf, GgufError, read, read_header
from .job import Progress, WorkerError
from .merge import layout
from .splits import check_set

if TYPE_CHECKING:
    from .download import Hub


@dataclass(frozen=True)
class _Split:
    """What is known of a split that is not here: its header, as bytes and read, and its digest."""

    name: str
    sha256: str
    gguf: Gguf
    header: bytes


def adopt(merged: Path, sources: Sequence[Wanted], token: str | None, progress: Progress) -> tuple[str, dict[str, str]]:
    """Return the merged file's digest, and by name the digest of every split that it was shown to hold.

    `sources` are the splits in order, on a hub. Raises GgufError or WorkerError that names what differs.
    """
    from .download import Hub

    hub = Hub(token)
    progress.phase("reading the splits' headers", len(sources), "headers")
    splits = []
    for item in sources:
        splits.append(_ask(hub, item))
        progress.advance(1)
    parts = [split.gguf for split in splits]
    check_set(parts)
    model = read(merged)
    with merged.open("rb", buffering=0) as file, Hasher() as whole:
        header = bytearray(model.data_offset)
        read_at(file, header, 0, len(header))
        places = {segment.name: segment.offset for segment in layout(model, bytes(header), parts).segments}
        if list(places) != [tensor.name for part in parts for tensor in part.tensors]:
            raise GgufError(f"{merged}: holds the tensors in another order than the splits; give its sha256 instead")
        whole.update(header)
        progress.phase("verifying what is there", model.size)
        rebuild = _Rebuild(file, whole, len(header), progress)
        for split in splits:
            digest = rebuild.digest(split, places)
            if digest != split.sha256:
                raise WorkerError(
                    f"{merged}: with what it holds, {split.name} would have sha256 {digest}, wanted {split.sha256}"
                )
        rebuild.skip_to(model.size)
        return whole.hexdigest(), {split.name: split.sha256 for split in splits}


def _ask(hub: Hub, item: Wanted) -> _Split:
    """Get header, size and digest of a split from the hub; the profile's come first."""
    record = hub.record(item.source)
    size, sha256 = item.size or record.size, item.sha256 or record.sha256
    if item.local or size is None or sha256 is None:
        raise WorkerError(f"{item.source}: neither profile nor hub know its size and sha256; fetch the splits instead")
    stream = _Remote(hub, item.source, size)
    gguf = read_header(cast(BinaryIO, stream), size, Path(item.name))
    return _Split(item.name, sha256, gguf, stream.start(gguf.data_offset))


class _Remote:
    """The beginning of a file on a hub, as much of it as was asked for."""

    def __init__(self, hub: Hub, url: str, size: int) -> None:
        self.hub, self.url, self.size = hub, url, size
        self.data = bytearray()

    def read(self, count: int) -> bytes:
        """Return the next bytes."""
        end = min(len(self.data) + count, self.size)
        block = self.hub.read(self.url, len(self.data), end) if end > len(self.data) else b""
        self.data += block
        return block

    def seek(self, position: int) -> None:
        """Only the reader's check of what follows the last tensor goes back, and it is content with no bytes."""

    def start(self, count: int) -> bytes:
        """Return the first bytes."""
        if count > len(self.data):
            self.read(count - len(self.data))
        return bytes(self.data[:count])


class _Rebuild:
    """Goes through the merged file once, and hashes it and, from its bytes, each split."""

    def __init__(self, merged: FileIO, whole: Hasher, start: int, progress: Progress) -> None:
        self.merged, self.whole, self.at, self.progress = merged, whole, start, progress
        self.ring = buffers()

    def digest(self, split: _Split, places: dict[str, int]) -> str:
        """Return the digest that the split has if its tensors are those in the merged file."""
        with Hasher() as hasher:
            hasher.update(split.header)
            done = len(split.header)
            for tensor in split.gguf.tensors:
                hasher.update(bytes(tensor.offset - done))
                self.skip_to(places[tensor.name])
                self._hash(tensor.nbytes, hasher)
                done = tensor.offset + tensor.nbytes
            hasher.update(bytes(split.gguf.size - done))
            return hasher.hexdigest()

    def skip_to(self, end: int) -> None:
        """Pass the padding, which the splits have as well, but not always as much of."""
        padding = bytearray(end - self.at)
        read_at(self.merged, padding, self.at, len(padding))
        self.whole.update(padding)
        self.at = end

    def _hash(self, nbytes: int, hasher: Hasher) -> None:
        for start in range(0, nbytes, BLOCK):
            count = min(BLOCK, nbytes - start)
            buffer = next(self.ring)
            read_at(self.merged, buffer, self.at, count)
            view = memoryview(buffer)[:count]
            self.whole.update(view)
            hasher.update(view)
            self.at += count
            self.progress.at(self.at)
