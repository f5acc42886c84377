"""Programs that talk to a driver, which may never return: subprocess.run would wait for what it killed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence


def run(command: Sequence[str], timeout_s: float) -> str:
    """What a program says within so many seconds; empty where it says nothing, does not start or does not end.

    One that hangs in the kernel is left there: no signal ends it, and who waits for it hangs as well.
    """
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            process.kill()
        return ""
