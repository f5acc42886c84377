"""What merging splits must give, worked out from the splits' headers alone.

`llama-gguf-split --merge` writes the metadata of the first split (with `split.count` 0 at the end), then all
tensors in the order of the splits. That makes the header of the merged file, and the place of every tensor in it,
known before it is written: the merge can be followed and compared as it grows.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .gguf import DEFAULT_ALIGNMENT, GGML_TYPES, MAGIC, Gguf, GgufError, Tensor, read_header
from .receipt import Entry, Receipt, receipt_name

_VERSION = 3
_U16 = 2
_SPLIT_COUNT = "split.count"
_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}


@dataclass(frozen=True)
class Segment:
    """One tensor: `nbytes` bytes at `offset` in the merged file, at `source_offset` in a split."""

    name: str
    source: Path
    source_offset: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A merged file: its first bytes, its tensors in order, its size in bytes."""

    header: bytes
    segments: tuple[Segment, ...]
    size: int


def expected_layout(parts: Sequence[Gguf]) -> Layout:
    """Return what merging the splits of one model gives.

    Raises GgufError where the tool would write a file that does not load.
    """
    for part in parts:
        if part.alignment != DEFAULT_ALIGNMENT:
            raise GgufError(
                f"{part.path}: general.alignment is {part.alignment}, but llama-gguf-split pads to "
                f"{DEFAULT_ALIGNMENT} when it merges; serve the splits as they are"
            )
    header, size = _expected_header(parts)
    merged = read_header(io.BytesIO(header), size, parts[0].path)
    return layout(merged, header, parts)


def layout(merged: Gguf, header: bytes, parts: Sequence[Gguf]) -> Layout:
    """Find the source of every tensor of a merged file; raise GgufError where the two do not hold the same."""
    _check_metadata(merged, parts[0])
    sources = {tensor.name: (part.path, tensor) for part in parts for tensor in part.tensors}
    segments = []
    for tensor in merged.tensors:
        path, source = sources.pop(tensor.name, (None, None))
        if path is None or source is None:
            raise GgufError(f"{merged.path}: holds tensor {tensor.name}, which no split holds")
        if (_shape(tensor), tensor.type) != (_shape(source), source.type):
            raise GgufError(
                f"{merged.path}: {tensor.name} is {tensor.type} {list(tensor.ne)}, "
                f"wanted {source.type} {list(source.ne)} as in {path.name}"
            )
        segments.append(Segment(tensor.name, path, source.offset, tensor.offset, tensor.nbytes))
    if sources:
        raise GgufError(f"{merged.path}: lacks {len(sources)} tensors, the first is {next(iter(sources))}")
    return Layout(header, tuple(segments), merged.size)


def _check_metadata(merged: Gguf, first: Gguf) -> None:
    for key in sorted(merged.metadata.keys() | first.metadata.keys()):
        if not key.startswith("split.") and merged.metadata.get(key) != first.metadata.get(key):
            raise GgufError(f"{merged.path}: {key} is not as in {first.path.name}")


def _expected_header(parts: Sequence[Gguf]) -> tuple[bytes, int]:
    """Return header and size of the merged file."""
    first, tensors = parts[0], [tensor for part in parts for tensor in part.tensors]
    with first.path.open("rb") as file:
        raw = file.read(first.data_offset)
    out = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(first.pairs)))
    for key, (start, end) in first.pairs.items():
        if key != _SPLIT_COUNT:
            out += raw[start:end]
    out += _string(_SPLIT_COUNT) + struct.pack("<IH", _U16, 0)
    offset = 0
    for tensor in tensors:
        out += _tensor_info(tensor, offset)
        offset += _padded(tensor.nbytes)
    out += bytes(_padded(len(out)) - len(out))
    return bytes(out), len(out) + offset


def _tensor_info(tensor: Tensor, offset: int) -> bytes:
    ne = _shape(tensor)
    shape = struct.pack(f"<I{len(ne)}Q", len(ne), *ne)
    return _string(tensor.name) + shape + struct.pack("<IQ", _NUMBERS[tensor.type], offset)


def _shape(tensor: Tensor) -> list[int]:
    """Return the dimensions as ggml counts them: up to the last that is not 1."""
    ne = list(tensor.ne) or [1]
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return ne


def _string(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padded(value: int) -> int:
    return -(-value // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def identities(splits: Mapping[Path, str | None], receipt: Receipt) -> dict[str, str]:
    """Return what each split is known by: its wanted digest, else its verified one, else size, mtime and inode.

    One that is not there and has no digest is known by its name only.
    """
    return {path.name: digest or _identity(path, receipt) for path, digest in splits.items()}


def _identity(path: Path, receipt: Receipt) -> str:
    entry = receipt.valid(receipt_name(path, receipt.folder))
    if entry:
        return entry.sha256
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"unverified:{found.st_size}:{found.st_mtime_ns}:{found.st_ino}"


def is_current(entry: Entry | None, made_from: Mapping[str, str], sha256: str | None) -> bool:
    """Say whether a merged file with a valid receipt is the one that is wanted.

    By its digest where one is wanted; else by the splits that it was made from, of which those that are
    gone by now count by name.
    """
    if entry is None:
        return False
    if sha256:
        return entry.sha256 == sha256
    return entry.made_from.keys() == made_from.keys() and all(
        wanted in {"", entry.made_from[name]} for name, wanted in made_from.items()
    )
