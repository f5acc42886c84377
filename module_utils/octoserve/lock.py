"""One lock on the host keeps two runs apart, and names who has it.

The lock is a file that says which run has it, and over which connection it came. It needs no cleaning up: it counts
only while that connection is open. A connection ends some time after its controller did (ssh's ControlPersist), or
where the controller lost its power, when TCP's keepalive notices. A controller that finds a lock of its own knows
sooner, since it sees whether that run still lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import atomic

NAME = "lock"
#: Programs that stand for a connection: of OpenSSH (also as sshd-session), or Ansible itself on its own host.
CONNECTIONS = ("sshd", "ansible")


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with its number by when it started (clock ticks since boot)."""

    pid: int
    started: int


@dataclass(frozen=True)
class Holder:
    """A run: ``who`` started ``what``; ``controller`` and ``run`` (its process there) tell runs apart."""

    who: str
    what: str
    controller: str
    run: Process
    since: str = ""
    connection: Process | None = None

    def same_run(self, other: Holder) -> bool:
        """Whether both are one run."""
        return (self.controller, self.run) == (other.controller, other.run)

    def __str__(self) -> str:
        return f"{self.who} ({self.what}, process {self.run.pid} there, since {self.since})"


class LockedError(RuntimeError):
    """Another run has the lock."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.holder = holder
        super().__init__(
            f"this host is locked by {holder}; its connection is open, as far as can be told. "
            "Wait for that run to end, or end it. "
            f"Where it is certainly gone, remove {path}"
        )


def acquire(folder: Path, me: Holder, dead: Holder | None = None, proc: Path = Path("/proc")) -> bool:
    """Take the lock, and return whether that is news. ``dead``: a holder that its own controller knows to be gone.

    Raises LockedError, or OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        holder = read(folder)
        mine = holder is not None and holder.same_run(me)
        if holder is not None and not mine and not (dead and holder.same_run(dead)) and is_connected(holder, proc):
            raise LockedError(folder / NAME, holder)
        since = holder.since if holder and mine else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        now = replace(me, since=since, connection=connection_of(os.getpid(), proc))
        if now != holder:  # a run can come over another connection than at first
            atomic.write_text(folder / NAME, json.dumps(asdict(now)) + "\n")
        return not mine


def release(folder: Path, me: Holder) -> bool:
    """Give the lock back where this run has it, and return whether it had it."""
    if not folder.exists():
        return False
    with _alone(folder):
        holder = read(folder)
        if holder is None or not holder.same_run(me):
            return False
        (folder / NAME).unlink()
        return True


def read(folder: Path) -> Holder | None:
    """Who is written down, None where nobody is, or nobody that could be told."""
    try:
        found = json.loads((folder / NAME).read_text())
        connection = found.pop("connection")
        run = Process(**found.pop("run"))
        return Holder(**found, run=run, connection=Process(**connection) if connection else None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def is_connected(holder: Holder, proc: Path = Path("/proc")) -> bool:
    """Whether the connection over which the lock was taken is still open; True where it could not be told."""
    return holder.connection is None or process(holder.connection.pid, proc) == holder.connection


def connection_of(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """The process that serves the connection over which this one was started, None where there is none that is known.

    The outermost that is, as Ansible's own forks end with their task; but not sshd itself, which serves everybody.
    """
    found = None
    while pid > 1:
        try:
            name, parent, started = stat(pid, proc)
        except OSError:
            break
        if name.startswith(CONNECTIONS) and not (name.startswith("sshd") and parent == 1):
            found = Process(pid, started)
        pid = parent
    return found


def process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """The process that has this number now."""
    try:
        return Process(pid, stat(pid, proc)[2])
    except OSError:
        return None


def stat(pid: int, proc: Path = Path("/proc")) -> tuple[str, int, int]:
    """Name, parent and start (clock ticks since boot) of a process, see proc_pid_stat(5). Raises OSError."""
    text = (proc / str(pid) / "stat").read_text()
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return name, int(rest[1]), int(rest[19])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other modules out while the file is read and written."""
    with (folder / f".{NAME}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
