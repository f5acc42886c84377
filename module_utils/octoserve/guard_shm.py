"""Guard before start: what an earlier run left in /dev/shm goes.

    python -m octoserve.guard_shm --user octoserve

NCCL, torch and vLLM unlink their shared memory when they end, but not when they are killed, and /dev/shm is memory.
Removed are files of the service's own account that no process maps or holds open; it has no other use for any.
Meant for a unit's ExecStartPre, where this service has no process. Ends 0 also where a file could not be removed,
and says so: what is left is found by the start that lacks the room.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder that this is about
PROC = Path("/proc")
MIB = 1024**2

Identity = tuple[int, int]


def owned(folder: Path, uid: int) -> dict[Path, Identity]:
    """Regular files of an account below a folder, each with device and inode."""
    found = {}
    for path in sorted(folder.rglob("*")):
        try:
            about = path.lstat()
        except OSError:  # its owner was faster
            continue
        if stat.S_ISREG(about.st_mode) and about.st_uid == uid:
            found[path] = (about.st_dev, about.st_ino)
    return found


def used(folder: Path, proc: Path = PROC) -> set[Identity]:
    """Device and inode of every file below the folder that a process maps or holds open."""
    found: set[Identity] = set()
    for entry in proc.iterdir():
        if entry.name.isdigit():
            found |= _mapped(entry, folder) | _open(entry, folder)
    return found


def _mapped(process: Path, folder: Path) -> set[Identity]:
    """From the table of mappings, which also says it where the files themselves may not be looked at."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:  # the process has ended
        return set()
    rows = [line.split(None, 5) for line in lines if f" {folder}/" in line]
    return {(os.makedev(*(int(part, 16) for part in row[3].split(":"))), int(row[4])) for row in rows}


def _open(process: Path, folder: Path) -> set[Identity]:
    found = set()
    with contextlib.suppress(OSError):  # the process has ended
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if link.readlink().is_relative_to(folder):
                    about = link.stat()
                    found.add((about.st_dev, about.st_ino))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Remove what is stale and say what was removed."""
    parser = argparse.ArgumentParser(prog="octoserve.guard_shm", description="Remove stale shared memory of a user.")
    parser.add_argument("--user", required=True, help="account that runs the service")
    options = parser.parse_args(argv)
    try:
        uid = pwd.getpwnam(options.user).pw_uid
    except KeyError:
        parser.error(f"there is no account {options.user}")
    freed, removed = 0, 0
    # Listed first: whoever makes a file of another instance meanwhile holds it open from the first moment.
    candidates = owned(SHARED_MEMORY, uid)
    in_use = used(SHARED_MEMORY) if candidates else set()
    for path in (path for path, identity in candidates.items() if identity not in in_use):
        try:
            size = path.lstat().st_blocks * 512
            path.unlink()
        except OSError as error:
            print(f"octoserve.guard_shm: {path} stays: {error.strerror}", file=sys.stderr)
            continue
        freed, removed = freed + size, removed + 1
    if removed:
        print(f"removed {removed} stale file(s) of {options.user} from {SHARED_MEMORY}, {freed / MIB:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
