"""Calls a module again until its long job is finished, and shows the progress.

The file of each such module's name beside this one is a symlink to it. What a module returns
meanwhile is `octoserve.job.Outcome.reply()`; see module_utils/octoserve/job.py.
"""

from __future__ import annotations

import json
import tempfile
import time
from typing import Any

from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

# A job runs on when the connection breaks, so a short break costs nothing but a line.
MAX_LOST_CONNECTIONS = 10
RECONNECT_SECONDS = 10.0
DEFAULT_TIMEOUT = 86400
# Lines come often while somebody may be watching, and more rarely in a download of an hour.
SHORT_WAIT, LONG_WAIT, PATIENCE = 5.0, 20.0, 60.0
# Time for the module's own work (receipts, start of the unit) beyond the job's limit.
GRACE = 300
# Arguments that may hold what private cases ask, or what it can be guessed from.
PRIVATE = ("suites", "references")
NOT_TOLD = "not told: private cases may be among them"
# Name of a file of Ansible's own temporary folder, which ends with the run; callback_plugins/evidence.py reads it.
ASKED_PREFIX = "octoserve-asked-"


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core ships no type information
    """One implementation for fetch, merge and install."""

    _requires_connection = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the module's last answer."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        arguments = dict(self._task.args)
        started = time.monotonic()
        timeout = float(arguments.get("timeout") or DEFAULT_TIMEOUT) + GRACE
        host = str((task_vars or {}).get("inventory_hostname", ""))
        lost, shown, kept = 0, "", False
        diff = None
        while True:
            elapsed = time.monotonic() - started
            if elapsed > timeout:
                return {
                    **result,
                    "failed": True,
                    "msg": f"job not finished after {elapsed:.0f} s (timeout {timeout - GRACE:.0f} s); "
                    f"it may still run on the host: run the playbook again to attach. Last seen: {shown}",
                }
            arguments["_job_wait"] = SHORT_WAIT if elapsed < PATIENCE else LONG_WAIT
            try:
                answer = self._execute_module(module_args=arguments, task_vars=task_vars)
            except AnsibleConnectionFailure as error:
                lost += 1
                if lost > MAX_LOST_CONNECTIONS or "_job_run" not in arguments:
                    raise
                self._show(host, f"connection lost, the job runs on ({lost} of {MAX_LOST_CONNECTIONS}): {error}")
                time.sleep(RECONNECT_SECONDS)
                continue
            lost = 0
            kept = self._hide(answer, kept)
            # Only the first call sees how things were before.
            diff = diff or answer.get("diff")
            if answer.get("failed") or answer.get("skipped") or answer.get("finished", True):
                answer.pop("job_run", None)
                return {**result, **({"diff": diff} if diff else {}), **answer}
            arguments["_job_run"] = answer["job_run"]
            text = str(answer["progress"]["text"])
            if text != shown:
                self._show(host, text)
                shown = text

    def _hide(self, answer: dict[str, Any], kept: bool) -> bool:
        """Take the private arguments out of what `-vvv` prints and `register` keeps; once, keep them for the report.

        The callback has to know the texts, or a message of a later task could bring one into the report.
        """
        told = (answer.get("invocation") or {}).get("module_args") or {}
        hidden = {name: told[name] for name in PRIVATE if told.get(name)}
        told.update(dict.fromkeys(hidden, NOT_TOLD))
        if hidden and not kept:
            with tempfile.NamedTemporaryFile(
                "w", dir=constants.DEFAULT_LOCAL_TMP, prefix=ASKED_PREFIX, delete=False
            ) as file:
                json.dump(hidden, file)
        return kept or bool(hidden)

    def _show(self, host: str, text: str) -> None:
        self._display.display(f"    {host} {self._task.action}: {text}")
