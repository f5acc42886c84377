"""The evidence of one run on one host: what is gathered, and the files it becomes.

``summary.json`` is what tests and CI rely on; ``ok`` is true only where every gate ran and passed. Needs jinja2,
so it is for the controller; nothing else here knows Ansible.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2

from . import atomic

DID_NOT_RUN = "did-not-run"
COHERENCE = "coherence"
THROUGHPUT = "throughput"
# What a failure in a chapter's phase is called; the phase `gates` is told apart by the gate that did not hold.
FAILED_PHASE = {"preflight": "preflight", "release": "install", "model": "install", "service": "start"}
CONTEXT_KEYS = ("stack", "profile", "deployment", "rolled_back", "failed_phase")
THROUGHPUT_KEYS = ("ok", "decode_tok_s", "ttft_ms", "end_to_end_tok_s", "baseline", "verdict", "reason")

SECRET_NAME = re.compile(r"(api_?key|token|password|passwd|secret|authorization)$", re.IGNORECASE)
SECRET_TEXT = re.compile(r"(?<=Bearer )\S+|\bhf_\w{16,}|\bsk-[\w-]{16,}|(?<=://)[^/\s@]+(?=@)")
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
REDACTED = "***"


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

    ``coherence`` and ``throughput`` are the gates' results, None where they did not run. ``context`` holds what
    the chapters tell: stack, profile, deployment, rolled_back. ``failed``: the host ended in a failure.
    """

    host: str
    started: datetime
    tasks: list[Task] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    coherence: dict[str, Any] | None = None
    throughput: dict[str, Any] | None = None
    context: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    def record(self, task: Task, result: Mapping[str, Any]) -> None:
        """Add one finished task with its result."""
        self.tasks.append(task)
        self.seconds.setdefault(task.phase, 0.0)
        told = (result.get("ansible_facts") or {}).get("octoserve_evidence") or {}
        self.context.update({key: told[key] for key in CONTEXT_KEYS if key in told})
        if "ok" not in result or result.get("skipped"):
            return
        # A gate that failed once in a run stays failed, also when it is asked again after a rollback.
        if task.action == "coherence_gate" and (self.coherence is None or self.coherence["ok"]):
            self.coherence = {key: result[key] for key in ("ok", "passed", "total", "cases")}
        if task.action == "throughput_gate" and (self.throughput is None or self.throughput["ok"]):
            details = ("details", "completion_tokens", "trials")
            self.throughput = {key: result[key] for key in (*THROUGHPUT_KEYS, *details)}

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


def summarize(run: Run) -> dict[str, Any]:
    """The content of ``summary.json``."""
    coherence = run.coherence or {"ok": False, "passed": 0, "total": 0, "cases": []}
    measured = run.throughput or {"ok": False, "verdict": DID_NOT_RUN, "reason": "the gate did not run"}
    throughput = {key: measured.get(key) for key in THROUGHPUT_KEYS}
    rolled_back = bool(run.context.get("rolled_back"))
    changed = {
        phase: sum(task.status == "changed" for task in run.tasks if task.phase == phase) for phase in run.seconds
    }
    return {
        "ok": bool(not run.failed and not rolled_back and coherence["ok"] and throughput["ok"]),
        "host": run.host,
        "stack": run.context.get("stack"),
        "profile": run.context.get("profile"),
        "deployment": run.context.get("deployment"),
        "failed_phase": run.failed_phase,
        "rolled_back": rolled_back,
        "phases": [
            {"name": phase, "seconds": round(seconds, 3), "changed": changed[phase]}
            for phase, seconds in run.seconds.items()
        ],
        "coherence": coherence,
        "throughput": throughput,
    }


def redact(value: Any, secrets: Iterable[str] = ()) -> Any:
    """A copy of JSON values without secrets: named ones, known ones, and texts that look like one.

    Halves of surrogate pairs become U+FFFD: no file could hold them.
    """
    known = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def clean(part: Any, name: str = "") -> Any:
        if isinstance(part, Mapping):
            return {clean(str(key)): clean(entry, str(key)) for key, entry in part.items()}
        if isinstance(part, (list, tuple)):
            return [clean(entry, name) for entry in part]
        if not isinstance(part, str):
            return part
        if part and SECRET_NAME.search(name):
            return REDACTED
        for secret in known:
            part = part.replace(secret, REDACTED)
        return SECRET_TEXT.sub(REDACTED, part).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    return clean(value)


def junit(summary: Mapping[str, Any], cause: str) -> str:
    """The run as JUnit XML: a suite for the phases and one for each gate. A gate that did not run is an error."""
    root = ElementTree.Element("testsuites", name=f"octoserve {summary['host']}")
    phases = _suite(root, "phases")
    for phase in summary["phases"]:
        _case(phases, phase["name"], phase["seconds"])
    if summary["failed_phase"]:
        failed = summary["failed_phase"]
        _case(phases, failed, 0.0, kind="failure", message=f"failed in {failed}", text=cause)
    coherence = _suite(root, COHERENCE)
    for case in summary["coherence"]["cases"]:
        kind = {"pass": "", "fail": "failure"}.get(case["verdict"], "error")
        text = f"prompt: {case['prompt']}\nanswer: {case['answer']}"
        _case(coherence, case["name"], case["seconds"], kind=kind, message=case["reason"], text=text)
    if not summary["coherence"]["cases"]:
        _case(coherence, COHERENCE, 0.0, kind="error", message="the gate did not run")
    result = summary["throughput"]
    kind = "" if result["ok"] else "failure" if result["verdict"] in ("fail", "regression") else "error"
    _case(_suite(root, THROUGHPUT), "decode_tok_s", 0.0, kind=kind, message=str(result["reason"]))
    for suite in root:
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("errors", str(len(suite.findall("testcase/error"))))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def render(template: Path, summary: Mapping[str, Any], run: Run, details: Mapping[str, Any]) -> str:
    """The report page: one HTML file that loads nothing. Everything that it shows is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(summary=summary, started=run.started, **details)


def write(run: Run, reports: Path, template: Path, secrets: Iterable[str] = ()) -> Path:
    """Write the report of a run and point ``latest`` at it; returns its folder. Raises OSError.

    The folder appears whole, under the time at which the run started.
    """
    known = list(secrets)
    summary = redact(summarize(run), known)
    cause = redact(asdict(run.cause), known) if run.failed_phase and run.cause else None
    measured = redact(run.throughput or {}, known)
    base = reports / run.host
    base.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=base, prefix=".writing-"))
    try:
        building.chmod(0o755)
        raw = building / "raw"
        raw.mkdir()
        tasks = [json.dumps(redact(asdict(task), known), ensure_ascii=False) for task in run.tasks]
        (raw / "tasks.jsonl").write_text("".join(f"{line}\n" for line in tasks), encoding="utf-8")
        _json(raw / "coherence.json", summary["coherence"])
        _json(raw / "throughput.json", measured)
        _json(building / "summary.json", summary)
        message = cause["message"] if cause else ""
        (building / "junit.xml").write_text(junit(summary, message), encoding="utf-8")
        page = render(template, summary, run, {"cause": cause, "measured": measured})
        (building / "report.html").write_text(page, encoding="utf-8")
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
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=name)


def _case(
    suite: ElementTree.Element,
    name: str,
    seconds: float,
    *,
    kind: str = "",
    message: str = "",
    text: str = "",
) -> None:
    case = ElementTree.SubElement(suite, "testcase", name=name, classname=suite.get("name", ""), time=f"{seconds:.3f}")
    if kind:
        reason = ElementTree.SubElement(case, kind, message=NOT_XML.sub("\ufffd", message))
        reason.text = NOT_XML.sub("\ufffd", text)
