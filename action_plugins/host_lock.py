"""Tells the module host_lock which run asks, and looks whether a holder of this controller still lives."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from octoserve import lock

PROC = Path("/proc")
#: Seconds to wait for another run, as the module's documentation says.
DEFAULT_TIMEOUT = 90
POLL_S = 3.0


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core ships no type information
    """Waits on the controller, so that it can say for whom."""

    _requires_connection = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the module's last answer."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        arguments: dict[str, Any] = {**self._task.args, "_run": asdict(this_run())}
        until = time.monotonic() + float(arguments.get("timeout", DEFAULT_TIMEOUT))
        shown = False
        while True:
            answer = self._execute_module(module_args=arguments, task_vars=task_vars)
            holder = answer.get("holder")
            if answer.pop("news", False):
                # Once more: where each task has a connection of its own, the one that it was taken over is gone.
                continue
            if not holder or time.monotonic() > until:
                return {**result, **answer}
            if is_dead(holder):
                arguments["_dead"] = holder
                continue
            if not shown:
                self._display.display(f"    {self._task.action}: {answer['msg']}")
                shown = True
            time.sleep(POLL_S)


def this_run() -> lock.Holder:
    """This run of ansible-playbook: tasks run in forks of its process."""
    pid = os.getpid()
    while (parent := lock.stat(pid)[1]) and _command(parent) == _command(os.getpid()):
        pid = parent
    run = lock.process(pid)
    if run is None:
        raise OSError(f"{PROC} does not show process {pid}; the lock needs it to tell runs apart")
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    what = " ".join(["ansible-playbook", *(Path(name).name for name in context.CLIARGS.get("args") or ())])
    return lock.Holder(who, what, controller_id(), run)


def controller_id() -> str:
    """This boot of this machine, or of this container on it."""
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {(PROC / 'self/ns/pid').readlink()}"


def is_dead(holder: dict[str, Any]) -> bool:
    """Whether the holder was a run of this controller that has ended; of others, this controller does not know."""
    run = lock.Process(**holder["run"])
    return bool(holder["controller"] == controller_id() and lock.process(run.pid) != run)


def _command(pid: int) -> bytes:
    return (PROC / str(pid) / "cmdline").read_bytes()
