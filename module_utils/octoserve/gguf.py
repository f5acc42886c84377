"""Reads the header of a GGUF file: metadata and where each tensor lies. Standard library only.

Format: GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian. Checked as llama.cpp checks it when loading, and against the size of the file, so that a
file which passes is complete in its extents (its content is a matter of checksums). Tensor data is not
read. Every fault is a GgufError that says what was found, what was wanted and what to do.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Union

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Limits of ggml (GGML_MAX_NAME, GGML_MAX_DIMS).
MAX_NAME, MAX_DIMENSIONS = 63, 4
# A length that a damaged file claims must not be read into memory. GLM-5's header has 12 MB.
MAX_HEADER = 512 << 20
#: So many first elements of a metadata array are kept.
ARRAY_HEAD = 8

#: Number in the file → name, elements a block, bytes a block (ggml.h, ggml-common.h).
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# Metadata value types: number → struct code.
_SCALARS = {
    0: ("u8", "<B"),
    1: ("i8", "<b"),
    2: ("u16", "<H"),
    3: ("i16", "<h"),
    4: ("u32", "<I"),
    5: ("i32", "<i"),
    6: ("f32", "<f"),
    7: ("bool", "<?"),
    10: ("u64", "<Q"),
    11: ("i64", "<q"),
    12: ("f64", "<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_SIZE = re.compile(rb"^size (\d+)$", re.MULTILINE)


class GgufError(ValueError):
    """The file is not a complete GGUF file, or splits do not belong together."""


@dataclass(frozen=True)
class Array:
    """A metadata array: its first elements, and a digest of all of them, so that two can be compared."""

    type: str
    length: int
    head: tuple[bool | int | float | str, ...]
    sha256: str


Value = Union[bool, int, float, str, Array]


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies.

    `ne` are ggml's dimensions, elements a row first (ne[0] is contiguous), so the reverse of a torch
    shape. `offset` is in bytes from the start of the file, `nbytes` the size of the data without padding.
    """

    name: str
    ne: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Gguf:
    """The header of one file. `size` is the file's size in bytes, `data_offset` where tensor data begins."""

    path: Path
    size: int
    version: int
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]
    alignment: int
    data_offset: int
    #: Where each metadata pair lies in the file, start and end.
    pairs: dict[str, tuple[int, int]]

    @property
    def architecture(self) -> str | None:
        """general.architecture, such as "glm-dsa"; splits after the first carry none."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None


def read(path: Path | str) -> Gguf:
    """Read and check the header of a GGUF file.

    Raises GgufError for every fault of the content, OSError where the file cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        return read_header(file, os.fstat(file.fileno()).st_size, path)


def read_header(file: BinaryIO, size: int, path: Path) -> Gguf:
    """Read and check a header from a stream, as the start of a file of `size` bytes; `path` is for messages."""
    return _Reader(path, file, size).read()


class _Reader:
    """Reads forward through the header, holding what was read in one buffer that grows."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.buffer = bytearray()
        self.at = 0

    def read(self) -> Gguf:
        version, tensor_count, pair_count = self._preamble()
        metadata: dict[str, Value] = {}
        pairs: dict[str, tuple[int, int]] = {}
        for number in range(pair_count):
            start = self.at
            key = self._name(f"metadata key {number}")
            if not key or key in metadata:
                raise self._error(f"metadata key {number} ({key!r}) is empty or there twice; the file is damaged")
            metadata[key] = self._value(key)
            pairs[key] = start, self.at
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(alignment, (Array, str, float)) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}, wanted a power of two; the file is damaged")
        infos = [self._tensor_info(number) for number in range(tensor_count)]
        data_offset = _pad(self.at, alignment)
        tensors = self._place(infos, data_offset, alignment)
        return Gguf(self.path, self.size, version, metadata, tensors, alignment, data_offset, pairs)

    def _preamble(self) -> tuple[int, int, int]:
        """Return version, number of tensors, number of metadata pairs."""
        self.buffer += self.file.read(1 << 20)
        start = bytes(self.buffer[:1024])
        if start.startswith(_LFS):
            stands_for = _LFS_SIZE.search(start)
            what = f"{int(stands_for[1])} bytes" if stands_for else "the real file"
            raise self._error(
                f"this is a Git LFS pointer ({self.size} bytes of text) that stands for {what}; "
                "fetch the file itself (a clone without git-lfs leaves such pointers)"
            )
        if len(start) < len(MAGIC) or start[: len(MAGIC)] != MAGIC:
            raise self._error(
                f"starts with {start[:16]!r}, wanted b'GGUF'; not a GGUF file (an error page of a download?)"
            )
        self.at = len(MAGIC)
        version = self._u32("version")
        if version & 0xFFFF == 0:
            raise self._error("is a big-endian GGUF file, wanted little-endian; convert it or fetch another")
        if version not in VERSIONS:
            raise self._error(f"has GGUF version {version}, wanted 2 or 3; convert it with a current llama.cpp")
        # The least bytes that one tensor (name, dimensions, type, offset) or one pair can take.
        tensors = self._count("number of tensors", 24)
        return version, tensors, self._count("number of metadata pairs", 13)

    def _value(self, key: str) -> Value:
        kind = self._u32(f"type of {key}")
        if kind != _ARRAY:
            return self._string(key) if kind == _STRING else self._scalar(kind, key)
        kind = self._u32(f"element type of {key}")
        if kind == _STRING:
            return self._string_array(key)
        name, code = self._scalar_type(kind, key)
        item = struct.Struct(code)
        length = self._count(f"length of {key}", item.size)
        data = self._take(length * item.size, key)
        head = tuple(value for (value,) in item.iter_unpack(data[: ARRAY_HEAD * item.size]))
        return Array(name, length, head, hashlib.sha256(data).hexdigest())

    def _string_array(self, key: str) -> Array:
        """Step over the strings; only the first are decoded: a vocabulary has 154,880."""
        length = self._count(f"length of {key}", 8)
        start = self.at
        head = tuple(self._string(key) for _ in range(min(length, ARRAY_HEAD)))
        buffer, at, unpack = self.buffer, self.at, _U64.unpack_from
        for _ in range(length - len(head)):
            if at + 8 > len(buffer):
                self._fill(at + 8, key)
            at += 8 + unpack(buffer, at)[0]
        self._fill(at, key)
        self.at = at
        with memoryview(buffer) as view:
            digest = hashlib.sha256(view[start:at]).hexdigest()
        return Array("str", length, head, digest)

    def _scalar_type(self, kind: int, key: str) -> tuple[str, str]:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise self._error(f"metadata {key} has value type {kind}, wanted 0 to 12; the file is damaged") from None

    def _scalar(self, kind: int, key: str) -> bool | int | float:
        _, code = self._scalar_type(kind, key)
        value: bool | int | float = struct.unpack(code, self._take(struct.calcsize(code), key))[0]
        return value

    def _tensor_info(self, number: int) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, ne, ggml type number, offset from the start of the data."""
        name = self._name(f"name of tensor {number}")
        if not name or len(name.encode()) > MAX_NAME:
            raise self._error(f"tensor {number} has the name {name[:100]!r}, wanted 1 to {MAX_NAME} bytes")
        dimensions = self._u32(f"dimensions of {name}")
        if dimensions > MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {dimensions} dimensions, wanted at most {MAX_DIMENSIONS}")
        ne = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions, name))
        return name, ne, self._u32(f"type of {name}"), self._u64(f"offset of {name}")

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], data_offset: int, alignment: int
    ) -> tuple[Tensor, ...]:
        """Compute extents; tensors follow each other padded, and the last ends with the file."""
        tensors: list[Tensor] = []
        seen: set[str] = set()
        wanted, end = 0, data_offset
        for name, ne, number, offset in infos:
            if name in seen:
                raise self._error(f"tensor {name} is there twice; the file is damaged")
            seen.add(name)
            if number not in GGML_TYPES:
                raise self._error(f"tensor {name} has ggml type {number}, which is not known here")
            kind, block, block_bytes = GGML_TYPES[number]
            row = ne[0] if ne else 1
            if row % block:
                raise self._error(f"tensor {name} has rows of {row} elements, wanted a multiple of {block} ({kind})")
            nbytes = row // block * block_bytes
            for extent in ne[1:]:
                nbytes *= extent
            if offset != wanted:
                raise self._error(f"tensor {name} starts at {offset} in the data, wanted {wanted}; the file is damaged")
            end = data_offset + offset + nbytes
            if end > self.size:
                raise self._truncated(end, f"tensor {name}")
            wanted = _pad(offset + nbytes, alignment)
            tensors.append(Tensor(name, ne, kind, data_offset + offset, nbytes))
        self._check_tail(end, data_offset + wanted)
        return tuple(tensors)

    def _check_tail(self, end: int, padded: int) -> None:
        if self.size <= max(end, padded):
            return
        self.file.seek(padded)
        tail = self.file.read(len(MAGIC))
        cause = (
            "another GGUF file follows: splits glued with cat? Merge them with gguf_merge"
            if tail == MAGIC
            else ("it does not end with its last tensor")
        )
        raise self._error(f"has {self.size} bytes, wanted {padded}; {cause}")

    # Bytes, each bounded by the size of the file.

    def _name(self, what: str) -> str:
        data = self._take(self._u64(f"length of {what}"), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self._error(f"{what} is {data[:40]!r}, which is not UTF-8; the file is damaged") from None

    def _string(self, what: str) -> str:
        # Tokens may hold parts of a character; nothing here depends on them.
        return self._take(self._u64(f"length of {what}"), what).decode(errors="replace")

    def _count(self, what: str, least: int) -> int:
        count = self._u64(what)
        if count * least > self.size - self.at:
            raise self._truncated(self.at + count * least, f"{what} ({count})")
        return count

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack(self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack(self._take(8, what))[0]
        return value

    def _take(self, count: int, what: str) -> bytes:
        end = self.at + count
        self._fill(end, what)
        data = bytes(self.buffer[self.at : end])
        self.at = end
        return data

    def _fill(self, end: int, what: str) -> None:
        """Have the buffer reach to `end`, a position in the file."""
        if end <= len(self.buffer):
            return
        if end > self.size:
            raise self._truncated(end, what)
        if end > MAX_HEADER:
            raise self._error(f"{what} would end at byte {end}, wanted a header of at most {MAX_HEADER} bytes")
        self.buffer += self.file.read(max(end - len(self.buffer), len(self.buffer), 1 << 20))
        if end > len(self.buffer):
            raise self._truncated(end, what)

    def _truncated(self, wanted: int, what: str) -> GgufError:
        return self._error(
            f"has {self.size} bytes, wanted at least {wanted} ({what}); truncated or damaged, fetch it again"
        )

    def _error(self, text: str) -> GgufError:
        return GgufError(f"{self.path}: {text}")


def _pad(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment
