"""Values of a document that people write: read, or refused with what was found and what was wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def integer(mapping: Any, key: str, least: int | None = None) -> int:
    """A whole number. Raises ValueError."""
    value = mapping.get(key) if isinstance(mapping, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key}: found {value!r}, wanted a whole number")
    if least is not None and value < least:
        raise ValueError(f"{key}: found {value}, wanted at least {least}")
    return value


def number(mapping: Any, key: str) -> float:
    """A finite number above 0. Raises ValueError."""
    value = mapping.get(key) if isinstance(mapping, Mapping) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key}: found {value!r}, wanted a number above 0")
    return float(value)


def text(mapping: Any, key: str) -> str:
    """A text that is not empty. Raises ValueError."""
    value = mapping.get(key) if isinstance(mapping, Mapping) else None
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key}: found {value!r}, wanted a text")
    return value


def known(mapping: Any, keys: Sequence[str]) -> None:
    """Raises ValueError where it is no mapping, or holds another key than these."""
    if not isinstance(mapping, Mapping):
        raise ValueError(f"found {mapping!r}, wanted {', '.join(keys)}")
    unknown = sorted(map(str, set(mapping) - set(keys)))  # YAML reads `yes:` as true and `1:` as a number
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(keys)}")
