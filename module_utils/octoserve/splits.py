"""Says whether the splits of a GGUF belong together, and sums up what they hold.

llama.cpp names splits `<prefix>-00001-of-00010.gguf`, counts them from 0 in `split.no`, repeats
`split.count` and `split.tensors.count` in each, and puts all other metadata into the first
(tools/gguf-split). A split of another quantization of the same model with the same division into files
cannot be told by its header: that takes the checksums of the profile.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .gguf import Array, Gguf, GgufError, Value, read

SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
# Strings longer than this (chat templates) are cut in facts.
_LONGEST_FACT = 200


def split_paths(path: Path) -> list[Path]:
    """Return the paths of all splits of the set that a split is named to be of, or the path alone."""
    match = SPLIT_NAME.match(path.name)
    if not match:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['prefix']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_set(paths: Sequence[Path]) -> tuple[Gguf, ...]:
    """Read the headers of one whole file or of all splits in order, and check that they belong together.

    Raises GgufError.
    """
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise GgufError(
            f"{paths[0].parent}: found {len(paths) - len(missing)} of {len(paths)} files, "
            f"missing {', '.join(missing)}; fetch them"
        )
    parts = tuple(read(path) for path in paths)
    check_set(parts)
    return parts


def split_count(part: Gguf) -> int:
    """Return of how many splits the file says it is one; 1 for a whole file (merging leaves a 0 there)."""
    return _number(part, "split.count", 0) or 1


def check_set(parts: Sequence[Gguf]) -> None:
    """Check that the files, in order, are one model: raises GgufError that names the file that is not."""
    first, count = parts[0], len(parts)
    for index, part in enumerate(parts):
        if split_count(part) != count:
            raise GgufError(
                f"{part.path}: is one of {split_count(part)} splits, but {count} file(s) were given; "
                "all splits of one model are needed, and nothing else"
            )
        number = _number(part, "split.no", 0)
        if number != index:
            raise GgufError(
                f"{part.path}: says it is split {number + 1} of {count}, wanted split {index + 1}; "
                "renamed or swapped with another: fetch it again"
            )
    if first.architecture is None:
        raise GgufError(f"{first.path}: has no general.architecture; this is not the first file of a model")
    for part in parts[1:]:
        _check_same_model(first, part)
    _check_names(parts)
    if count > 1:
        _check_tensor_count(parts)
    _check_dimensions(parts)


def _check_same_model(first: Gguf, part: Gguf) -> None:
    """What a later split repeats of the metadata must agree with the first."""
    for key, value in part.metadata.items():
        wanted = first.metadata.get(key)
        if key != "split.no" and value != wanted:
            raise GgufError(
                f"{part.path}: {key} is {_short(value)}, wanted {_short(wanted)} as in {first.path.name}; "
                "it belongs to another model: fetch it again"
            )


def _check_names(parts: Sequence[Gguf]) -> None:
    owner: dict[str, Path] = {}
    for part in parts:
        for tensor in part.tensors:
            if tensor.name in owner:
                raise GgufError(
                    f"{part.path}: holds {tensor.name}, which {owner[tensor.name].name} holds already: "
                    "one of the two belongs to another model: fetch both again"
                )
            owner[tensor.name] = part.path


def _check_tensor_count(parts: Sequence[Gguf]) -> None:
    wanted = _number(parts[0], "split.tensors.count", -1)
    found = sum(len(part.tensors) for part in parts)
    if found != wanted:
        each = ", ".join(f"{part.path.name}: {len(part.tensors)}" for part in parts)
        raise GgufError(
            f"{parts[0].path}: the splits hold {found} tensors, wanted split.tensors.count {wanted}; "
            f"one belongs to another model ({each})"
        )


def _check_dimensions(parts: Sequence[Gguf]) -> None:
    """Layers and widths that tensors show must be those of the metadata: tells models of other sizes."""
    first = parts[0]
    blocks = _number(first, f"{first.architecture}.block_count", 0)
    width = _number(first, f"{first.architecture}.embedding_length", 0)
    for part in parts:
        for tensor in part.tensors:
            match = _BLOCK.match(tensor.name)
            if match and blocks and int(match[1]) >= blocks:
                raise GgufError(f"{part.path}: holds {tensor.name}, but {first.path.name} has {blocks} blocks")
            if tensor.name.endswith("attn_norm.weight") and width and tensor.ne != (width,):
                raise GgufError(
                    f"{part.path}: {tensor.name} has the dimensions {list(tensor.ne)}, wanted [{width}] as "
                    f"{first.path.name} says; it belongs to another model: fetch it again"
                )


def facts(parts: Sequence[Gguf]) -> dict[str, Any]:
    """Sum up one model: JSON values, small; arrays appear as type and length, long strings cut."""
    first = parts[0]
    types: dict[str, dict[str, int]] = {}
    for part in parts:
        for tensor in part.tensors:
            entry = types.setdefault(tensor.type, {"tensors": 0, "bytes": 0})
            entry["tensors"] += 1
            entry["bytes"] += tensor.nbytes
    return {
        "architecture": first.architecture,
        "version": first.version,
        "size": sum(part.size for part in parts),
        "tensors": sum(len(part.tensors) for part in parts),
        "tensor_bytes": sum(tensor.nbytes for part in parts for tensor in part.tensors),
        "parameters": sum(_elements(tensor.ne) for part in parts for tensor in part.tensors),
        "types": types,
        "splits": split_count(first),
        "files": [{"path": str(part.path), "size": part.size, "tensors": len(part.tensors)} for part in parts],
        "metadata": {key: _fact(value) for key, value in sorted(first.metadata.items()) if key not in _SPLIT_KEYS},
    }


def _elements(ne: tuple[int, ...]) -> int:
    product = 1
    for extent in ne:
        product *= extent
    return product


def _fact(value: Value) -> Any:
    if isinstance(value, Array):
        return {"type": value.type, "length": value.length}
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_FACT else value[:_LONGEST_FACT] + "…"
    # JSON has neither infinities nor NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Value | None) -> str:
    return "absent" if value is None else repr(_fact(value))


def _number(part: Gguf, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if not isinstance(value, int):
        raise GgufError(f"{part.path}: {key} is {_short(value)}, wanted a number; the file is damaged")
    return value
