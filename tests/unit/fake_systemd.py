"""A fake of systemd-run and systemctl: a unit is a process in the background, its PID in a file. It knows no systemd.

usage: fake_systemd.py FOLDER systemd-run|systemctl ARGUMENT...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

INVOCATION = "4f1a6a0c0d5e4a8c9a3d6f0d3b1f7a55"


def install(folder: Path) -> Path:
    """Commands of these names in a folder for PATH; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("systemd-run", "systemctl"):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {folder} {name} "$@"\n')
        command.chmod(0o755)
    return folder


def alive(unit: Path) -> bool:
    """Whether the unit's process runs."""
    try:
        os.kill(int(unit.read_text()), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def main() -> int:
    """Act as one of the two."""
    folder, name, *arguments = sys.argv[1:]
    if name == "systemd-run":
        split = arguments.index("--")
        options, command = arguments[:split], arguments[split + 1 :]
        values = [option.partition("=")[2] for option in options]
        named = dict(zip((option.partition("=")[0] for option in options), values))
        added = [value for option, value in zip(options, values) if option.startswith("--setenv=")]
        environment = {**os.environ, **dict(value.split("=", 1) for value in added)}
        with (Path(folder) / f"{named['--unit']}.log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        (Path(folder) / named["--unit"]).write_text(str(process.pid))
    elif arguments[0] == "stop":
        os.kill(int((Path(folder) / arguments[-1]).read_text()), signal.SIGTERM)
    elif "--property=ActiveState" in arguments:
        print("active" if alive(Path(folder) / arguments[-1]) else "inactive")
    else:
        print(f"ActiveState=active\nSubState=running\nInvocationID={INVOCATION}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
