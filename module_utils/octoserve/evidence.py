"""The evidence of one run on one host: what is gathered, and the files it becomes.

``summary.json`` is what tests and CI rely on; ``ok`` is true only where every gate ran and passed. For the controller:
what the summary becomes is in ``report/``, which needs its packages. Nothing here knows Ansible.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from . import atomic
from .report.junit import junit
from .report.markdown import markdown
from .report.metrics import Origin, exposition
from .report.page import render
from .report.redaction import redact

DID_NOT_RUN = "did-not-run"
COULD_NOT_RUN = "could-not-run"
ANOTHER_START = "the service ended or was started again: what was measured is not all of one start"
DEFAULT_INSTANCE = "main"
COHERENCE = "coherence"
THROUGHPUT = "throughput"
PREFLIGHT = "preflight"
PREFLIGHT_KEYS = ("ok", "counts", "container", "findings")
# What a failure in a chapter's phase is called; the phase `gates` is told apart by the gate that did not hold.
FAILED_PHASE = {"preflight": "preflight", "release": "install", "model": "install", "service": "start"}
# The facts that tell of a run; a role names its own by its prefix.
TOLD_BY = ("octoserve_evidence", "gates_evidence")
CONTEXT_KEYS = ("stack", "profile", "instance", "deployment", "restored", "rolled_back", "failed_phase")
NO_COHERENCE: dict[str, Any] = {
    **{"ok": False, "passed": 0, "total": 0, "seconds": None, "suites": [], "bootstrap": False, "recorded": []},
    **{"cases": [], "left_out": []},
}
CASE: dict[str, Any] = {"kind": "question", "reasoning": "", "tool_calls": [], "private": False, "measured": None}
THROUGHPUT_KEYS = (
    *("ok", "decode_tok_s", "ttft_ms", "end_to_end_tok_s", "baseline", "verdict", "reason"),
    *("steady_tok_s", "itl_ms", "points", "generator", "gpus"),
)
# Only in raw/throughput.json: long, and nothing that a script decides by.
THROUGHPUT_RAW_KEYS = ("details", "completion_tokens", "trials", "warmup", "gpus_reason")


@dataclass(frozen=True)
class Task:
    """One finished task. ``status``: ok, changed, skipped, ignored, failed or unreachable."""

    phase: str
    name: str
    action: str
    status: str
    seconds: float
    message: str = ""

    @property
    def broke(self) -> bool:
        """Whether the task stopped the host, unless it was rescued."""
        return self.status in ("failed", "unreachable")


@dataclass
class Run:
    """What one run did on one host, gathered task by task.

    ``preflight`` holds the findings about the host, None where nobody looked.
    ``coherence`` and ``throughput`` are the gates' results, None where they did not run. ``context`` holds what
    the chapters tell: stack, profile, deployment, rolled_back, and ``restored``, the deployment that was to come back
    (``deployment`` null: there was none, the service is stopped). ``of_restored``: its gates' verdicts. ``failed``: the
    host ended in a failure. ``inventory``: as on the command line, for the command that the report says to type next.
    """

    host: str
    started: datetime
    tasks: list[Task] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    coherence: dict[str, Any] | None = None
    throughput: dict[str, Any] | None = None
    preflight: dict[str, Any] | None = None
    context: dict[str, Any] = field(default_factory=dict)
    of_restored: dict[str, bool] = field(default_factory=dict)
    failed: bool = False
    inventory: str = ""

    def record(self, task: Task, result: Mapping[str, Any]) -> None:
        """Add one finished task with its result."""
        self.tasks.append(task)
        self.seconds.setdefault(task.phase, 0.0)
        facts = result.get("ansible_facts") or {}
        told = {key: value for name in TOLD_BY for key, value in (facts.get(name) or {}).items()}
        # What fails after it speaks of the deployment that was to come back, not of what made this run fail.
        kept = [key for key in CONTEXT_KEYS if key != "failed_phase" or not self.context.get("restored")]
        self.context.update({key: told[key] for key in kept if key in told})
        if told.get("restarted"):
            self._does_not_hold()
        # A module that broke, or a long job that was lost, gave no verdict.
        if "ok" not in result or result.get("skipped"):
            return
        if task.action == PREFLIGHT:
            self.preflight = {key: result.get(key) for key in PREFLIGHT_KEYS}
        if self.context.get("restored"):
            if task.action in ("coherence_gate", "throughput_gate"):
                self.of_restored[task.action.removesuffix("_gate")] = bool(result["ok"])
            return
        # A gate that failed once in a run stays failed.
        if task.action == "coherence_gate" and (self.coherence is None or self.coherence["ok"]):
            self.coherence = coherence_of(result)
        if task.action == "throughput_gate" and (self.throughput is None or self.throughput["ok"]):
            self.throughput = throughput_of(result)

    def _does_not_hold(self) -> None:
        """The service ended or was started again between or in the gates: none of them holds, whatever it found."""
        if self.context.get("restored"):
            self.of_restored = dict.fromkeys(self.of_restored, False)
            return
        self.coherence = dict(NO_COHERENCE)
        if self.throughput is not None:
            self.throughput = throughput_of({"ok": False, "verdict": COULD_NOT_RUN, "reason": ANOTHER_START})

    @property
    def cause(self) -> Task | None:
        """The task that the failure began with: the first that broke in the phase that broke last."""
        broken = [task for task in self.tasks if task.broke]
        return next((task for task in broken if task.phase == broken[-1].phase), None)

    @property
    def failed_phase(self) -> str | None:
        """Which part failed, in the words of the exit codes; None where nothing did."""
        if not self.failed and not self.context.get("rolled_back"):
            return None
        if told := self.context.get("failed_phase"):
            return str(told)
        if self.cause is None:
            return None
        if self.cause.phase in FAILED_PHASE:
            return FAILED_PHASE[self.cause.phase]
        return THROUGHPUT if self.coherence is not None and self.coherence["ok"] else COHERENCE


def coherence_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the report keeps of the coherence gate's result: ok only where each of its cases passed, and it had some."""
    kept = {key: result.get(key, default) for key, default in NO_COHERENCE.items()}
    ok = bool(kept["ok"]) and not result.get("failed") and 0 < kept["total"] == kept["passed"]
    return {**kept, "ok": ok, "cases": [{**CASE, **case} for case in kept["cases"]]}


def throughput_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the report keeps of the throughput gate's result."""
    kept = {key: result.get(key) for key in (*THROUGHPUT_KEYS, *THROUGHPUT_RAW_KEYS)}
    return {**kept, "ok": bool(kept["ok"]) and not result.get("failed")}


def summarize(run: Run) -> dict[str, Any]:
    """The content of ``summary.json``."""
    coherence = run.coherence or dict(NO_COHERENCE)
    measured = run.throughput or {"ok": False, "verdict": DID_NOT_RUN, "reason": "the gate did not run"}
    throughput = {key: measured.get(key) for key in THROUGHPUT_KEYS}
    if throughput["baseline"]:
        throughput["baseline"] = {key: value for key, value in throughput["baseline"].items() if key != "history"}
    rolled_back = bool(run.context.get("rolled_back"))
    changed = {
        phase: sum(task.status == "changed" for task in run.tasks if task.phase == phase) for phase in run.seconds
    }
    return {
        "ok": bool(not run.failed and not rolled_back and coherence["ok"] and throughput["ok"]),
        "host": run.host,
        "stack": run.context.get("stack"),
        "profile": run.context.get("profile"),
        "instance": run.context.get("instance"),
        "inventory": run.inventory or None,
        "deployment": run.context.get("deployment"),
        "failed_phase": run.failed_phase,
        "rolled_back": rolled_back,
        "restored": {**run.context["restored"], **run.of_restored} if run.context.get("restored") else None,
        "phases": [
            {"name": phase, "seconds": round(seconds, 3), "changed": changed[phase]}
            for phase, seconds in run.seconds.items()
        ],
        "coherence": coherence,
        "throughput": throughput,
    }


def metrics(run: Run, summary: Mapping[str, Any]) -> str:
    """The content of ``metrics.prom``."""
    origin = Origin(
        summary["instance"] or DEFAULT_INSTANCE, summary["profile"], summary["stack"], summary["deployment"]
    )
    return exposition(origin, run.started, summary["ok"], summary["coherence"], summary["throughput"])


def write(run: Run, reports: Path, template: Path, secrets: Iterable[str] = (), private: Iterable[str] = ()) -> Path:
    """Write the report of a run and point ``latest`` at it; returns its folder. Raises OSError.

    ``secrets`` and what private cases ask are blackened.

    The folder appears whole, under the time at which the run started.
    """
    clean = partial(redact, secrets=set(secrets), private=set(private))
    summary = clean(summarize(run))
    cause = clean(asdict(run.cause)) if run.failed_phase and run.cause else None
    measured = clean(run.throughput or {})
    base = reports / run.host
    base.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=base, prefix=".writing-"))
    try:
        building.chmod(0o755)
        raw = building / "raw"
        raw.mkdir()
        tasks = [json.dumps(clean(asdict(task)), ensure_ascii=False) for task in run.tasks]
        (raw / "tasks.jsonl").write_text("".join(f"{line}\n" for line in tasks), encoding="utf-8")
        _json(raw / "coherence.json", summary["coherence"])
        _json(raw / "throughput.json", measured)
        if run.preflight is not None:
            _json(raw / "preflight.json", clean(run.preflight))
        _json(building / "summary.json", summary)
        files = {
            "junit.xml": junit(summary, cause["message"] if cause else ""),
            "metrics.prom": metrics(run, summary),
            "summary.md": markdown(summary, cause),
            "report.html": render(template, summary, measured, cause, run.started),
        }
        for name, text in files.items():
            (building / name).write_text(text, encoding="utf-8")
        folder = _rename_free(building, base, run.started.strftime("%Y-%m-%dT%H-%M-%SZ"))
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(building)
        raise
    atomic.point(base / "latest", folder.name)
    return folder


def _rename_free(building: Path, base: Path, name: str) -> Path:
    """Rename to the first free name: two runs may start in one second."""
    for number in range(1, 1000):
        folder = base / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return building.rename(folder)
    raise FileExistsError(f"{base / name} and all its numbered neighbours exist")


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
