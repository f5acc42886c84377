"""References: how likely each token of a scored text was when the model was known to be right.

A file holds ``{case: {identity, perplexity, logprobs, …}}``: SHA-256 of what was scored, its perplexity, and the
natural log probability of each scored token. The rest says where it comes from. A profile may bring one
(``gates.reference``); else the first deploy of the profile writes one on the host. It speaks of the model and not of
the stack, so a new stack is held to what the old one measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import atomic

KEYS = ("identity", "logprobs", "perplexity")


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
        raise ValueError(f"found {type(document).__name__}, wanted of each case {', '.join(KEYS)}")
    for name, entry in document.items():
        if not isinstance(entry, dict) or not _is_entry(entry):
            raise ValueError(f"{name}: wanted {', '.join(KEYS)}, the log probabilities as a list of numbers")
    return document


def add(path: Path, result: Mapping[str, Any], **told: str) -> list[str]:
    """Record the texts of a passed first deploy that have no reference yet; returns their names.

    Raises ValueError where the record is damaged, OSError where it cannot be written.
    """
    record = load(path)
    scored = {case["name"]: case["measured"] for case in result["cases"] if case["kind"] == "score"}
    fresh = {
        name: {key: measured[key] for key in KEYS} | told
        for name, measured in scored.items()
        if measured["drift"] is None
    }
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, text({**record, **fresh}))
    return sorted(fresh)


def text(references: Mapping[str, Mapping[str, Any]]) -> str:
    """The content of a file: a line for each key, the log probabilities on one."""
    entries = []
    for name, entry in sorted(references.items()):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry[key])}" for key in sorted(entry))
        entries.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _is_entry(entry: Mapping[str, Any]) -> bool:
    numbers = entry.get("logprobs")
    return (
        set(entry) >= set(KEYS)
        and isinstance(numbers, list)
        and bool(numbers)
        and all(_is_number(value) for value in [entry["perplexity"], *numbers])
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
