"""What the first deploy of a profile measured: perplexities that later deploys on this host are held to.

One file a profile, ``{case: {perplexity, identity, time, stack, deployment}}``; ``identity`` is the SHA-256 of what was
scored. A perplexity belongs to the model and not to the stack, so a new stack is held to the record of the old one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import atomic

KEYS = {"perplexity", "identity"}


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Read the record; empty where there is none. Raises ValueError where it is damaged, OSError."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not all(set(entry) >= KEYS for entry in record.values()):
            raise ValueError("not of each case perplexity and identity")
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: found no record of perplexities ({error}), wanted what the coherence gate wrote; move the file "
            "away and deploy once with gates_bootstrap=true"
        ) from error
    return record


def add(path: Path, result: Mapping[str, Any], **told: str) -> list[str]:
    """Record the texts of a passed first deploy that have no limit yet; returns their names.

    Raises ValueError where the record is damaged, OSError where it cannot be written.
    """
    record = load(path)
    fresh = {
        case["name"]: {key: case["measured"][key] for key in sorted(KEYS)} | told
        for case in result["cases"]
        if case["kind"] == "score" and case["measured"]["limit"] is None
    }
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps({**record, **fresh}, indent=1, sort_keys=True) + "\n")
    return sorted(fresh)
