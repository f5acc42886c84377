"""References: how likely each token of a scored text was when the model was known to be right.

A file holds ``{case: {identity, logprobs, perplexity, …}}``: SHA-256 of what was scored, the natural log probability of
each scored token, and for people what perplexity that is. The rest says where it comes from. A profile may bring one
(``gates.reference``); else the first deploy of the profile writes one on the host, readable by root alone: who has the
model could guess a private text from it. It speaks of the model and not of the stack, so a new stack is held to what
the old one measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import atomic

KEYS = ("identity", "logprobs")
MODE = 0o600


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Read a host's record; empty where there is none. Raises ValueError where it is damaged, OSError."""
    try:
        return check(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; this is no record that the coherence gate wrote: move the file away and deploy once "
            "with gates_bootstrap=true"
        ) from error


def check(document: Any) -> dict[str, dict[str, Any]]:
    """The document where it is a reference. Raises ValueError."""
    if not isinstance(document, dict):
        raise ValueError(f"found {type(document).__name__}, wanted of each case {' and '.join(KEYS)}")
    for name, entry in document.items():
        if not isinstance(entry, dict) or not set(entry) >= set(KEYS):
            raise ValueError(f"{name}: found {sorted(entry) if isinstance(entry, dict) else entry!r}, wanted {KEYS}")
        numbers = entry["logprobs"]
        if not isinstance(numbers, list) or not numbers or not all(map(_is_logprob, numbers)):
            raise ValueError(f"{name}: logprobs: wanted a list of numbers, none above 0")
    return document


def add(path: Path, fresh: Mapping[str, Mapping[str, Any]], **told: str) -> list[str]:
    """Record the texts of a passed first deploy (``to_record`` of the gate's result); returns their names.

    Raises ValueError where the record is damaged, OSError where it cannot be written.
    """
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {**load(path), **{name: {**entry, **told} for name, entry in fresh.items()}}
        atomic.write_text(path, text(record), MODE)
    return sorted(fresh)


def text(references: Mapping[str, Mapping[str, Any]]) -> str:
    """The content of a file: a line for each key, the log probabilities on one."""
    entries = []
    for name, entry in sorted(references.items()):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry[key])}" for key in sorted(entry))
        entries.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def strangers(names: Iterable[str], texts: Iterable[str], what: str) -> None:
    """Raises ValueError where a name is that of no scored text: it would hold nothing."""
    known = sorted(texts)
    if unknown := sorted(set(names) - set(known)):
        there = ", ".join(known) or "none"
        raise ValueError(f"{what}: {', '.join(unknown)}: no scored text is called so; there are {there}")


def _is_logprob(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value <= 0
