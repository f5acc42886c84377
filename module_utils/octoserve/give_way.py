"""A unit that was set up by hand gives way to the service, and comes back as it was while no deployment has passed.

What it was is kept beside the deployments until one of them has passed: a run that is killed, or a power cut, in the
middle of the first deploy must not leave a host that serves nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import atomic

NAME = "gave_way.json"
PROPERTIES = ("LoadState", "ActiveState", "UnitFileState")
#: Units that `systemctl disable` takes out of the boot; static and generated ones it cannot.
STARTS_AT_BOOT = ("enabled", "enabled-runtime", "linked", "linked-runtime")
RUNS = ("active", "activating", "reloading")
#: Seconds for a stop: an engine may take its unit's whole TimeoutStopSec.
STOP_S = 1800.0


class GiveWayError(RuntimeError):
    """systemd did not do as it was told; the message says what it was told and what it said."""


@dataclass(frozen=True)
class Stood:
    """How the unit stood before it gave way."""

    unit: str
    active: bool
    enabled: bool


def look(unit: str) -> Stood | None:
    """How a unit stands now; None where systemd knows none of that name."""
    shown = show(unit, PROPERTIES)
    if shown["LoadState"] != "loaded":
        return None
    return Stood(unit, shown["ActiveState"] in RUNS, shown["UnitFileState"] in STARTS_AT_BOOT)


def show(unit: str, properties: Sequence[str]) -> dict[str, str]:
    """What systemd says of a unit, whether there is one or not; empty what it does not say."""
    command = ["systemctl", "show", f"--property={','.join(properties)}", "--", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    return {name: found.get(name, "") for name in properties}


def read(folder: Path) -> Stood | None:
    """What gave way and may have to come back; None where nothing did."""
    try:
        return Stood(**json.loads((folder / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def step_aside(folder: Path, unit: str, *, dry: bool = False) -> bool:
    """Remember how the unit stands, then stop it. Returns whether there was something to do. Raises GiveWayError.

    It still starts at boot: that is taken from it when a deployment has passed.
    """
    stands = look(unit)
    if stands is None or not (stands.active or (stands.enabled and read(folder) is None)):
        return False
    if not dry:
        if read(folder) is None:
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_text(folder / NAME, json.dumps(asdict(stands)) + "\n")
        _tell("stop", unit)
    return True


def come_back(folder: Path, *, dry: bool = False, wait: bool = True) -> str:
    """Start what gave way as it stood, and forget it. Returns its name, else empty. Raises GiveWayError.

    Empty, too, where the unit was removed meanwhile: nothing came back.
    """
    stood = read(folder)
    if stood is None:
        return ""
    there = look(stood.unit) is not None
    if not dry:
        if there and stood.enabled:
            _tell("enable", stood.unit)
        if there and stood.active:
            _tell(*(() if wait else ("--no-block",)), "start", stood.unit)
        (folder / NAME).unlink()
    return stood.unit if there else ""


def retire(folder: Path, *, dry: bool = False) -> str:
    """Take what gave way out of the boot, and forget it. Returns its name, else empty. Raises GiveWayError."""
    stood = read(folder)
    if stood is None:
        return ""
    stands = look(stood.unit)
    if not dry:
        if stands and stands.enabled:
            _tell("disable", stood.unit)
        (folder / NAME).unlink()
    return stood.unit


def _tell(*words: str) -> None:
    """Raises GiveWayError."""
    try:
        done = subprocess.run(["systemctl", *words], capture_output=True, text=True, timeout=STOP_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise GiveWayError(f"systemctl {' '.join(words)} did not end within {STOP_S:.0f} s; stop it by hand") from error
    if done.returncode:
        raise GiveWayError(f"systemctl {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
