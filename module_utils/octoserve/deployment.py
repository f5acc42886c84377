"""Deployments: immutable, numbered records of one profile resolved on one release, and which of them serves.

`<folder>/0001/deployment.json` never changes once written; `state.json` beside it says how far it came. The symbolic
link `current` points at the one whose gates passed last. What runs is the newest that neither failed nor was retired by
a way back to an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from . import atomic

RECORD, STATE, CURRENT = "deployment.json", "state.json", "current"
#: Where systemd finds the units that Octoserve writes.
UNITS = Path("/etc/systemd/system")
DIGITS = 4
#: What a deployment can have come to.
STATES = ("recorded", "passed", "failed", "retired")
#: Out of service.
OUT = ("failed", "retired")


class DeploymentError(RuntimeError):
    """A record is damaged or absent; the message says which and what to do."""


def digest(content: dict[str, Any]) -> str:
    """SHA-256 over a record's content, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def numbers(folder: Path) -> list[int]:
    """Numbers of the complete records, ascending."""
    found = [path.parent.name for path in folder.glob(f"*/{RECORD}")]
    return sorted(int(name) for name in found if name.isdigit())


def next_number(folder: Path) -> int:
    """The number of the record to come. A folder whose record is gone keeps its own."""
    taken = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    return max(taken, default=0) + 1


def find(folder: Path, content: dict[str, Any]) -> int | None:
    """The newest record where it has exactly this content, else None.

    Only the newest: what runs is always the highest number, also after a way back to what an older one holds.
    """
    number = max(numbers(folder), default=None)
    if number is None or digest(read(folder, number)) != digest(content):
        return None
    return number


def in_service(folder: Path) -> list[int]:
    """Deployments that are not out of service, ascending."""
    return [number for number in numbers(folder) if state(folder, number) not in OUT]


def running(folder: Path) -> int | None:
    """The newest deployment that is not out of service, or None."""
    return max(in_service(folder), default=None)


def started(folder: Path, unit: Path) -> int | None:
    """The deployment in service whose unit systemd has, or None. Raises DeploymentError.

    Between the record of a deployment and its start, while its model is checked, that is the one before it. A unit that
    somebody edited is in no record: then the newest in service.
    """
    text = unit.read_text() if unit.exists() else None
    newest_first = in_service(folder)[::-1]
    with_unit = (number for number in newest_first if read(folder, number).get("unit") == text)
    return next(with_unit, newest_first[0] if newest_first else None)


def listed(folder: Path) -> list[dict[str, Any]]:
    """Every deployment: number, state, when it came to that, profile, stack and release. Raises DeploymentError."""
    found = []
    for number in numbers(folder):
        content, reached = read(folder, number), _read_state(folder, number)
        about = {key: content.get(key) for key in ("profile", "stack", "release")}
        found.append({"number": number, "state": state(folder, number), "at": reached.get("at"), **about})
    return found


def describe(folder: Path) -> list[str]:
    """Every deployment in a line, the newest first. Raises DeploymentError."""
    marks = {running(folder): "runs", current(folder): "current"}
    if running(folder) == current(folder):
        marks = {running(folder): "runs, current"}
    return [
        f"deployment {one['number']}: {one['state']} at {one['at']}, {one['profile']} on {one['release']}"
        + (f" ({marks[one['number']]})" if one["number"] in marks else "")
        for one in reversed(listed(folder))
    ]


def newer(folder: Path, number: int) -> list[int]:
    """Deployments after this one that are not out of service."""
    return [other for other in in_service(folder) if other > number]


def read(folder: Path, number: int) -> dict[str, Any]:
    """The content of a record. Raises DeploymentError."""
    path = folder / name_of(number) / RECORD
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DeploymentError(f"{path}: {error}; restore it, or remove its folder to forget this deployment") from error
    if not isinstance(content, dict):
        raise DeploymentError(f"{path}: wanted a mapping; restore it, or remove its folder to forget this deployment")
    return content


def record(folder: Path, content: dict[str, Any]) -> int:
    """Write a new record and return its number. Whole or not at all."""
    number = next_number(folder)
    final = folder / name_of(number)
    partial = folder / f".{final.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    atomic.write_text(partial / RECORD, json.dumps(content, indent=1, sort_keys=True) + "\n")
    _write_state(partial, "recorded")
    partial.rename(final)
    return number


def state(folder: Path, number: int) -> str:
    """How far a deployment came: one of STATES."""
    return str(_read_state(folder, number).get("state", "recorded"))


def set_state(folder: Path, number: int, value: str) -> bool:
    """Record how far a deployment came. Returns whether that is news."""
    if state(folder, number) == value:
        return False
    _write_state(folder / name_of(number), value)
    return True


def current(folder: Path) -> int | None:
    """The deployment whose gates passed last, or None. Raises DeploymentError for a link that is not ours."""
    link = folder / CURRENT
    if not link.is_symlink():
        return None
    target = link.readlink()
    if not target.name.isdigit():
        raise DeploymentError(f"{link} points at {target}, wanted a number; remove it, or point it at a deployment")
    return int(target.name)


def make_current(folder: Path, number: int) -> bool:
    """Point `current` at a deployment, with no moment without it. Returns whether it pointed elsewhere."""
    if current(folder) == number:
        return False
    atomic.point(folder / CURRENT, name_of(number))
    return True


def name_of(number: int) -> str:
    """Folder of a number: 0007."""
    return f"{number:0{DIGITS}d}"


def _read_state(folder: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads((folder / name_of(number) / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_state(path: Path, value: str) -> None:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    atomic.write_text(path / STATE, json.dumps({"state": value, "at": when}) + "\n")
