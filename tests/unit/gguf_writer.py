"""Writes small GGUF files for tests: an independent statement of the format, in few lines."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIGNMENT = 32
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Typed:
    """A metadata value with its type number; `element` is set for arrays."""

    kind: int
    value: Any
    element: int | None = None


def u16(value: int) -> Typed:
    return Typed(2, value)


def u32(value: int) -> Typed:
    return Typed(4, value)


def i32(value: int) -> Typed:
    return Typed(5, value)


def text(value: str) -> Typed:
    return Typed(8, value)


def array(element: int, values: Sequence[Any]) -> Typed:
    return Typed(9, list(values), element)


@dataclass(frozen=True)
class Data:
    """A tensor: ne, ggml type number, raw bytes."""

    ne: tuple[int, ...]
    kind: int
    data: bytes


class Unwritten(bytes):
    """Stands for so many bytes of tensor data: the header needs only their number, a sparse file none of them."""

    length: int

    def __new__(cls, count: int) -> Unwritten:
        instance = super().__new__(cls)
        instance.length = count
        return instance

    def __len__(self) -> int:
        return self.length


def f32(*values: float) -> Data:
    return Data((len(values),), 0, struct.pack(f"<{len(values)}f", *values))


def _string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _plain(kind: int, value: Any) -> bytes:
    return _string(value) if kind == 8 else struct.pack("<" + _CODES[kind], value)


def _value(typed: Typed) -> bytes:
    if typed.kind != 9:
        return _plain(typed.kind, typed.value)
    assert typed.element is not None
    head = struct.pack("<IQ", typed.element, len(typed.value))
    return head + b"".join(_plain(typed.element, item) for item in typed.value)


def header(metadata: dict[str, Typed], tensors: dict[str, Data], version: int = 3, alignment: int = ALIGNMENT) -> bytes:
    """Return the file up to where tensor data begins."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, typed in metadata.items():
        out += _string(key) + struct.pack("<I", typed.kind) + _value(typed)
    offset = 0
    for name, tensor in tensors.items():
        out += _string(name) + struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne)
        out += struct.pack("<IQ", tensor.kind, offset)
        offset += len(tensor.data) + -len(tensor.data) % alignment
    return bytes(out + bytes(-len(out) % alignment))


def gguf(metadata: dict[str, Typed], tensors: dict[str, Data], version: int = 3, alignment: int = ALIGNMENT) -> bytes:
    """Return a whole file."""
    body = b"".join(tensor.data + bytes(-len(tensor.data) % alignment) for tensor in tensors.values())
    return header(metadata, tensors, version, alignment) + body


def split_set(folder: Path, prefix: str, parts: Sequence[dict[str, Data]], metadata: dict[str, Typed]) -> list[Path]:
    """Write splits as llama-gguf-split does: all metadata in the first, split.* in each."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(len(part) for part in parts)
    paths = []
    for number, tensors in enumerate(parts):
        keys = {
            **(metadata if number == 0 else {}),
            "split.no": u16(number),
            "split.count": u16(len(parts)),
            "split.tensors.count": i32(total),
        }
        path = folder / f"{prefix}-{number + 1:05}-of-{len(parts):05}.gguf"
        path.write_bytes(gguf(keys, tensors))
        paths.append(path)
    return paths


def tiny_parts(blocks: int = 3, width: int = 4, seed: float = 0.0) -> list[dict[str, Data]]:
    """One part a block, each with a norm of `width` and a little Q8_0 matrix."""
    return [
        {
            f"blk.{block}.attn_norm.weight": f32(*(seed + block + i for i in range(width))),
            f"blk.{block}.ffn_down.weight": Data((32, 3), 8, bytes((7 * block + i) % 256 for i in range(102))),
        }
        for block in range(blocks)
    ]


def tiny_metadata(blocks: int = 3, width: int = 4, name: str = "tiny") -> dict[str, Typed]:
    return {
        "general.architecture": text("glm-dsa"),
        "general.name": text(name),
        "glm-dsa.block_count": u32(blocks),
        "glm-dsa.embedding_length": u32(width),
        "tokenizer.ggml.tokens": array(8, [f"t{i}" for i in range(20)]),
    }


def tiny_set(folder: Path, prefix: str = "tiny", blocks: int = 3, width: int = 4) -> list[Path]:
    """Write a set of `blocks` splits with one block each."""
    return split_set(folder, prefix, tiny_parts(blocks, width), tiny_metadata(blocks, width))
