"""Watch a service come up: what its unit does, what its journal says, whether it answers a real completion."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

_PROPERTIES = ("ActiveState", "SubState", "Result", "ExecMainStatus", "InvocationID", "NRestarts")
# vLLM prefixes its lines: "(EngineCore pid=12) ERROR 11-30 01:02:03 [core.py:12] text".
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:(?:DEBUG|INFO|WARNING|ERROR)\s+[\d-]+\s+[\d:.]+\s+\[[^\]]*\]\s*)?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::\s|$)")
_GUARD = re.compile(r"^octoserve\.guard_\w+: ")
_VALIDATION = re.compile(r"\d+ validation errors? for \w+$")
#: Says only that another process failed, whose own words came before.
_SECONDARY = ("Engine core initialization failed", "WorkerProc initialization failed")
TAIL_LINES = 12


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit; names as in systemd.unit(5) and org.freedesktop.systemd1(5)."""

    active: str
    sub: str
    result: str
    exit_status: str
    invocation: str
    restarts: int

    @property
    def alive(self) -> bool:
        """Whether a start is under way or done; a unit that waits for its next restart has died."""
        return self.active in {"active", "activating", "reloading"} and not self.sub.startswith("auto-restart")


def unit_state(unit: str) -> UnitState:
    """Ask systemd. Raises OSError or CalledProcessError where it does not answer."""
    command = ["systemctl", "show", f"--property={','.join(_PROPERTIES)}", unit]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return UnitState(
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        result=values.get("Result", ""),
        exit_status=values.get("ExecMainStatus", ""),
        invocation=values.get("InvocationID", ""),
        restarts=int(values.get("NRestarts") or 0),
    )


def seconds_since_start(unit: str) -> float:
    """Seconds since the newest start of a unit began, its guards included; a clock that is set does not matter."""
    command = ["systemctl", "show", "--property=InactiveExitTimestampMonotonic", "--value", unit]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return time.clock_gettime(time.CLOCK_MONOTONIC) - int(text or 0) / 1e6


def journal(unit: str, invocation: str = "", since: str = "", lines: int = 400) -> list[str]:
    """The newest lines of one start of a unit, or of all of them since a time as journalctl takes it, oldest first."""
    command = ["journalctl", "--quiet", "--output=cat", "--no-pager", f"--lines={lines}"]
    command += [f"--since={since}"] if since else []
    command += (
        [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"] if invocation else ["-u", unit]
    )
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.splitlines()


def bare(line: str) -> str:
    """A line of the journal without vLLM's prefix."""
    return _PREFIX.sub("", line).strip()


def last_words(lines: Sequence[str]) -> str:
    """The newest line that says something, for a progress display."""
    for line in reversed(lines):
        text = bare(line)
        if any(letter.isalnum() for letter in text):
            return text[:150]
    return "nothing in the journal yet"


def refusal(lines: Sequence[str]) -> str:
    """What guards said who let no start happen, each thing once; empty where they said nothing."""
    return "; ".join(dict.fromkeys(text for text in map(bare, lines) if _GUARD.match(text)))


def cause(lines: Sequence[str]) -> str:
    """Why a start died: the first exception that is not merely about another process, else a guard, else the end."""
    texts = [bare(line) for line in lines]
    for number, text in enumerate(texts):
        if not _EXCEPTION.match(text) or any(words in text for words in _SECONDARY):
            continue
        # pydantic, which checks vLLM's options, says below its exception what is wrong.
        detail = texts[number + 1 : number + 2] if _VALIDATION.search(text) else []
        return ": ".join([text, *detail])
    return refusal(lines) or "; ".join(text for text in texts[-TAIL_LINES:] if text) or "its journal is empty"
