"""What a committed result of a long suite says of its origin; scripts/stale_results.py reads it."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octoserve import atomic

ROOT = Path(__file__).resolve().parents[1]


def origin(covers: Sequence[str]) -> dict[str, Any]:
    """The commit and the day it is made on, the paths that it speaks of, and those of them that are in no commit."""
    changed = [line[3:] for line in _git("status", "--short", "--", *covers).splitlines()]
    return {
        "commit": _git("rev-parse", "HEAD").strip(),
        **({"uncommitted": changed} if changed else {}),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "covers": list(covers),
        "cores": os.cpu_count(),
    }


def digest(covers: Sequence[str]) -> str:
    """SHA-256 of all files that a result speaks of, as they are now, in a commit or not."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *covers)
    found = hashlib.sha256()
    for path in sorted(ROOT / name for name in set(listed.split("\0")) - {""}):
        if path.is_file():  # neither removed meanwhile nor a link to a folder
            found.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def save(path: Path, made_by: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all."""
    atomic.write_text(path, json.dumps({**made_by, **found}, indent=1, ensure_ascii=False) + "\n")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
