"""Ansible callback: gather what the chapters of a deploy did and write the report of the run."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.plugins.callback import CallbackBase
from ansible.template import Templar

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "module_utils"))

from octoserve import evidence
from octoserve.report import redaction

DOCUMENTATION = r"""
name: evidence
type: notification
short_description: Write the evidence of a deploy
description:
  - At the end of a run of chapters, also of one that failed, writes C(report.html), C(summary.json), C(summary.md),
    C(junit.xml), C(metrics.prom) and C(raw/) into C(<reports>/<host>/<UTC time>/) for each host and points
    C(<reports>/<host>/latest) at it.
  - A play is a chapter when it has the play variable C(octoserve_phase), one of C(preflight), C(release), C(model),
    C(service), C(gates), written out and not templated.
  - The fact C(octoserve_evidence), set by any task, tells C(stack), C(profile), C(deployment), C(rolled_back) and,
    where it is not the first failure, C(failed_phase). Later ones add to earlier ones.
  - Writes nothing in check mode and for runs without a chapter.
options:
  reports:
    description: Folder of the reports.
    type: path
    env:
      - name: OCTOSERVE_REPORTS
    ini:
      - section: evidence
        key: reports
"""

MESSAGE_CHARS = 20000
# action_plugins/long_job.py leaves there what the gates were asked.
ASKED_FILES = "octoserve-asked-*"


class CallbackModule(CallbackBase):  # type: ignore[misc]  # ansible-core ships no types
    """Gathers per host; see DOCUMENTATION."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "evidence"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._started = datetime.now(timezone.utc)
        self._runs: dict[str, evidence.Run] = {}
        self._secrets: dict[str, set[str]] = {}
        self._play: Any = None
        self._phase = ""
        self._play_began = 0.0
        self._earlier: dict[tuple[str, str], float] = {}
        self._task_began: dict[tuple[str, str], float] = {}

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._play = play
        self._phase = str(play.get_vars().get("octoserve_phase") or "")
        self._play_began = time.monotonic()
        # A phase may be spread over plays: its seconds add up.
        self._earlier = {
            (host, phase): seconds for host, run in self._runs.items() for phase, seconds in run.seconds.items()
        }

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._task_began[host.get_name(), task._uuid] = time.monotonic()

    def v2_runner_on_ok(self, result: Any) -> None:
        self._record(result, "changed" if result.result.get("changed") else "ok")

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._record(result, "skipped")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._record(result, "ignored" if ignore_errors else "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._record(result, "ignored" if result.task.ignore_unreachable else "unreachable")

    def v2_playbook_on_stats(self, stats: Any) -> None:
        if context.CLIARGS.get("check"):
            return
        reports = Path(self.get_option("reports") or ROOT / "reports")
        # A message of any task may quote what a private case asks.
        private = private_texts(Path(constants.DEFAULT_LOCAL_TMP))
        for host, run in self._runs.items():
            counts = stats.summarize(host)
            run.failed = bool(counts["failures"] or counts["unreachable"])
            try:
                secret = self._secrets.get(host, set())
                folder = evidence.write(run, reports, ROOT / "templates/report.html.j2", secret, private)
            except Exception as error:  # a fault in one report must not cost the others
                self._display.error(f"no report of {host}: {error!r}; wanted to write it below {reports}")
                continue
            self._display.display(f"report: {folder / 'report.html'} ({verdict(run)})")

    def _record(self, result: Any, status: str) -> None:
        if not self._phase:
            return
        host, now = result.host.get_name(), time.monotonic()
        run = self._runs.get(host) or self._new_run(result.host)
        began = self._task_began.get((host, result.task._uuid), now)
        task = evidence.Task(
            phase=self._phase,
            name=str(result.task.name or result.task.action),
            action=str(result.task.action).rsplit(".", 1)[-1],
            status=status,
            seconds=round(now - began, 3),
            message=message(result.result) if status in ("failed", "unreachable", "ignored") else "",
        )
        run.record(task, result.result)
        run.seconds[self._phase] = self._earlier.get((host, self._phase), 0.0) + now - self._play_began

    def _new_run(self, host: Any) -> evidence.Run:
        manager = self._play.get_variable_manager()
        variables = manager.get_vars(play=self._play, host=host)
        run = evidence.Run(host.get_name(), self._started, inventory=inventory())
        # Known before any task ran, and so also of a host that was never reached.
        profile = template(manager, variables, "octoserve_profile")
        run.context["profile"] = profile if isinstance(profile, str) else None
        instance = template(manager, variables, "octoserve_instance")
        run.context["instance"] = instance if isinstance(instance, str) else evidence.DEFAULT_INSTANCE
        self._secrets[host.get_name()] = secrets(manager, variables)
        self._runs[host.get_name()] = run
        return run


def private_texts(folder: Path) -> set[str]:
    """What the private cases of this run asked."""
    files = folder.glob(ASKED_FILES)
    return redaction.private_texts([json.loads(file.read_text(encoding="utf-8")) for file in files])


def verdict(run: evidence.Run) -> str:
    """The run in a few words, for the last line on the terminal."""
    if evidence.summarize(run)["ok"]:
        return "ok"
    return f"failed: {run.failed_phase}" if run.failed_phase else "no verdict: the gates did not both run"


def inventory() -> str:
    """The inventories of this run as they can be typed where it was started; empty where they are no files."""
    here = Path.cwd()
    paths = [Path(str(source)) for source in context.CLIARGS.get("inventory") or ()]
    if not paths or not all(path.exists() for path in paths):
        return ""
    names = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths]
    return " -i ".join(shlex.quote(name) for name in names)


def message(result: Mapping[str, Any]) -> str:
    """What a failed task said: its message, and what its command wrote."""
    if result.get("_ansible_no_log") or result.get("censored"):
        return "hidden by no_log"
    parts = [str(result[key]).strip() for key in ("msg", "stderr", "module_stderr") if result.get(key)]
    if len(parts) > 1 and parts[0] == "non-zero return code":
        parts = parts[1:]  # what the command says counts
    for item in result.get("results") or []:
        if item.get("failed") and item.get("msg"):
            parts.append(str(item["msg"]).strip())
    return "\n".join(parts)[:MESSAGE_CHARS]


def template(manager: Any, variables: Mapping[str, Any], name: str) -> Any:
    """The value of a variable, None where it has none or cannot be templated yet."""
    try:
        return Templar(loader=manager._loader, variables=variables).template(variables.get(name))
    except Exception:  # a variable may need facts or a vault that are not there; the report does without
        return None


def secrets(manager: Any, variables: Mapping[str, Any]) -> set[str]:
    """Values of variables and of the environment whose names say that they are secret."""
    named = [template(manager, variables, name) for name in variables if redaction.SECRET_NAME.search(name)]
    named += [value for name, value in os.environ.items() if redaction.SECRET_NAME.search(name)]
    return {str(value) for value in named if isinstance(value, str) and len(value) >= redaction.MIN_SECRET_CHARS}
