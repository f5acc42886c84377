"""A stack: pinned versions and the patch series that belongs to them, read from its folder.

The folder holds `stack.yml`, one lock for each variant (cpu, cuda), `series.yml` and the patches. A *release* is a
stack's variant installed on a host; its name carries a digest of all that went into it, so that any change of a
lock or a patch makes another release beside the old one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StackError(RuntimeError):
    """A stack's folder does not hold what a stack needs; the message says what was found and wanted."""


@dataclass(frozen=True)
class Variant:
    """One build of a stack."""

    stack: str
    name: str
    #: Python that the lock was resolved for, such as "3.11".
    python: str
    lock: Path
    extra_index_urls: tuple[str, ...]
    #: Modules that must import before a release counts as complete.
    imports: tuple[str, ...]
    #: Operators that vLLM's kernels must have registered, such as "_C.init_cpu_memory_env": a kernel library that
    #: does not load is only a warning to vLLM.
    operators: tuple[str, ...] = ()


def variant(folder: Path, document: Any, name: str) -> Variant:
    """Check `stack.yml` as read and return one of its variants. Raises StackError."""
    where = folder / "stack.yml"
    if not isinstance(document, dict) or document.get("name") != folder.name:
        found = document.get("name") if isinstance(document, dict) else type(document).__name__
        raise StackError(f"{where}: found name {found!r}, wanted the folder's, {folder.name!r}")
    variants = document.get("variants")
    if not isinstance(variants, dict) or name not in variants:
        known = ", ".join(map(str, variants)) if isinstance(variants, dict) else "none"
        raise StackError(f"{where}: no variant {name!r}; it has: {known}")
    entry = variants[name]
    if not isinstance(entry, dict):
        raise StackError(f"{where}: variant {name} is {entry!r}, wanted a mapping")
    unknown = sorted(set(entry) - {"python", "requirements", "extra_index_urls", "imports", "operators"})
    if unknown:
        raise StackError(f"{where}: variant {name} has unknown keys {unknown}")
    lock = folder / _text(entry, "requirements", where)
    if not lock.is_file():
        raise StackError(f"{where}: variant {name} names {lock.name}, which is not there; run: make lock")
    return Variant(
        stack=folder.name,
        name=name,
        python=_text(entry, "python", where),
        lock=lock,
        extra_index_urls=_texts(entry, "extra_index_urls", where),
        imports=_texts(entry, "imports", where),
        operators=_texts(entry, "operators", where),
    )


def release_name(found: Variant) -> str:
    """`<stack>-<variant>-<digest>`; the digest covers the lock, the series and every patch, in their bytes."""
    folder = found.lock.parent
    digest = hashlib.sha256(f"{found.stack} {found.name} {found.python}\n".encode())
    for path in [found.lock, folder / "series.yml", *sorted(folder.glob("*.patch"))]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return f"{found.stack}-{found.name}-{digest.hexdigest()[:10]}"


def _text(entry: Mapping[str, Any], key: str, where: Path) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise StackError(f"{where}: {key} is {value!r}, wanted text")
    return value


def _texts(entry: Mapping[str, Any], key: str, where: Path) -> tuple[str, ...]:
    value = entry.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise StackError(f"{where}: {key} is {value!r}, wanted a list of text")
    return tuple(value)
