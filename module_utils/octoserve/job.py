"""Long jobs (fetch, merge, install) as transient systemd units that survive the controller.

A *module* (library/, on the host, as root) calls `follow(Job(...), run, wait)`. It starts
`octoserve-job-<name>.service`, or attaches to the one that runs, waits at most `wait` seconds and
returns an `Outcome`. `Outcome.reply()` is what the module returns while the job runs: the action
plugin of the same name calls the module again with `_job_run` until it is finished:

    job = Job("fetch-glm5", "fetch_worker", spec)
    outcome = follow(job, module.params["_job_run"], module.params["_job_wait"])
    module.exit_json(changed=True, **outcome.finish(module))

`ARGUMENTS` are the two private arguments that such a module adds to its own. On its first call
(`_job_run` is None) a module first looks whether there is anything to do at all; when it is called
again it must not, because the work that it would find done was done by this very task.

A *worker* is a module of this package that ends in

    if __name__ == "__main__":
        sys.exit(job.main(work))

with `work(spec, secrets, progress) -> result`, both dictionaries of JSON values. An error that an
operator can act on is raised as `WorkerError`. Workers resume: a job whose unit died without a last
word (reboot, SIGKILL) is started again with the same spec; one that systemd ended at its timeout is not.

The state of a job is JSON in /var/lib/octoserve/jobs/<name>.json:
{name, worker, run, attempt, digest, state: running|done|failed, phase, done, total, unit, rate, eta,
started, updated, error, result}; times are Unix seconds, rate is `unit` per second, eta seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Protocol

JOBS = Path("/var/lib/octoserve/jobs")
LIBRARY = Path("/opt/octoserve/lib")
PYTHON = Path("/opt/octoserve/tools/bin/python")

#: Added to the argument_spec of every module that follows a job; set by the action plugin only.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "_job_run": {"type": "str"},
    "_job_wait": {"type": "float", "default": 5.0},
}

#: A job that dies this often without a word (out of memory, say) is not started again.
MAX_ATTEMPTS = 3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}\Z")
_WRITE_INTERVAL = 0.5
_RATE_WINDOW = 15.0
_POLL = 0.2
_PROGRESS_KEYS = ("phase", "done", "total", "unit", "rate", "eta")


class JobError(RuntimeError):
    """A job could not be started or followed."""


class WorkerError(RuntimeError):
    """Raised by a worker: the message is for the operator, no traceback is needed."""


@dataclass(frozen=True)
class Job:
    """What to run. `spec` decides, by its digest, whether a running job is this one; `secrets` do not.

    Secrets (token, proxies) go through a 0600 file that the worker deletes as it reads it.
    `timeout` is in seconds and bounds the unit (RuntimeMaxSec); `properties` are further unit
    properties such as "MemoryMax=64G".
    """

    name: str
    worker: str
    spec: dict[str, Any]
    secrets: dict[str, Any] = field(default_factory=dict, repr=False)
    timeout: int = 86400
    properties: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a name that is no file or unit name."""
        if not _NAME.match(self.name):
            raise JobError(f"{self.name!r} is no job name: wanted at most 101 of letters, digits, _ . -")

    @property
    def unit(self) -> str:
        """Name of the systemd unit."""
        return f"octoserve-job-{self.name}.service"

    @property
    def digest(self) -> str:
        """SHA-256 over worker and spec."""
        text = json.dumps([self.worker, self.spec], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """What is known of a job after a wait: not finished, finished with `result`, or `error`."""

    run: str
    finished: bool
    progress: dict[str, Any]
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def reply(self) -> dict[str, Any]:
        """Return the keys that the action plugin reads."""
        return {"finished": self.finished, "job_run": self.run, "progress": self.progress}

    def finish(self, module: Module, **told: Any) -> dict[str, Any]:
        """Return the result of a job that is done; where it failed or runs, end the module.

        `told` goes into the answer of a module whose job runs.
        """
        if self.error:
            module.fail_json(msg=self.error, **self.reply())
        if not self.finished:
            module.exit_json(changed=False, **self.reply(), **told)
        return {**self.reply(), **self.result}


class Module(Protocol):
    """What is used of an AnsibleModule; both methods end the process."""

    def exit_json(self, **result: Any) -> Any:
        """Answer and end."""

    def fail_json(self, msg: str, **result: Any) -> Any:
        """Answer with an error and end."""


class Launcher(Protocol):
    """How a job's process is started, looked for and stopped."""

    def start(self, job: Job, command: list[str], environment: dict[str, str]) -> None:
        """Start the command in the job's unit and return once it is executing."""

    def alive(self, job: Job) -> bool:
        """Say whether the job's unit has a process."""

    def stop(self, job: Job) -> None:
        """End the unit and return when it has ended."""


class Systemd:
    """Transient units, `systemd-run --collect`."""

    def start(self, job: Job, command: list[str], environment: dict[str, str]) -> None:
        """Start the unit; Type=exec makes a missing interpreter an error here."""
        properties = ("Type=exec", f"RuntimeMaxSec={job.timeout}", "TimeoutStopSec=30", *job.properties)
        self._call(
            "systemd-run",
            "--collect",
            "--quiet",
            f"--unit={job.unit}",
            f"--description=Octoserve job {job.name}",
            *(f"--property={item}" for item in properties),
            *(f"--setenv={key}={value}" for key, value in environment.items()),
            "--",
            *command,
        )

    def alive(self, job: Job) -> bool:
        """Ask systemd for the unit's ActiveState."""
        state = self._call("systemctl", "show", "--property=ActiveState", "--value", job.unit).strip()
        return state in {"active", "activating", "deactivating", "reloading"}

    def stop(self, job: Job) -> None:
        """`systemctl stop` waits for the end, bounded by TimeoutStopSec and SIGKILL."""
        self._call("systemctl", "stop", job.unit)

    @staticmethod
    def _call(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except FileNotFoundError as error:
            raise JobError(f"{command[0]} is not on this host: long jobs need systemd") from error
        except subprocess.TimeoutExpired as error:
            raise JobError(f"{command[0]} did not answer within 120 s; see 'systemctl status'") from error
        if done.returncode:
            raise JobError(f"{' '.join(command[:2])} ended {done.returncode}: {done.stderr.strip()}")
        return done.stdout


# --- the module's side -------------------------------------------------------------------------


def follow(
    job: Job,
    run: str | None = None,
    wait: float = 5.0,
    *,
    launcher: Launcher | None = None,
    jobs: Path = JOBS,
    library: Path = LIBRARY,
    python: Path = PYTHON,
) -> Outcome:
    """Start the job or attach to it, wait at most `wait` seconds, say how it stands.

    Without `run` (first call): attach to a job that runs with the same spec, else start one, after
    stopping one of another spec. With `run`: follow that run to its result or error; start it again
    where its unit died within its time, at most MAX_ATTEMPTS times.

    Raises JobError where systemd refuses.
    """
    launcher = launcher or Systemd()
    jobs.mkdir(parents=True, exist_ok=True)
    starter = _Starter(job, launcher, jobs, library, python)
    deadline = time.monotonic() + wait
    with _locked(jobs / f"{job.name}.lock"):
        if run is None:
            run = starter.attach_or_start()
    while True:
        # The unit first: once it is gone, the state that it left is final.
        alive = launcher.alive(job)
        state = read_state(jobs / f"{job.name}.json")
        if state.get("run") != run:
            return Outcome(run, True, {}, error=_replaced(job, state))
        if state["state"] == "running" and not alive:
            attempt = int(state["attempt"])
            if time.time() >= float(state.get("started", math.inf)) + job.timeout:
                return Outcome(run, True, _progress(state), error=_late(job, state))
            if attempt >= MAX_ATTEMPTS:
                return Outcome(run, True, _progress(state), error=_died(job, state, attempt))
            with _locked(jobs / f"{job.name}.lock"):
                starter.start(run, attempt + 1)
            continue
        if state["state"] != "running":
            error = str(state["error"]) if state["state"] == "failed" else None
            return Outcome(run, True, _progress(state), state.get("result") or {}, error)
        if time.monotonic() >= deadline:
            return Outcome(run, False, _progress(state))
        time.sleep(_POLL)


def read_state(path: Path) -> dict[str, Any]:
    """Return the state in the file, or {} where there is none or it is not JSON."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_json(path: Path, value: dict[str, Any], mode: int = 0o644, durable: bool = False) -> None:
    """Write the file as a whole or not at all; `durable` also waits for the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), mode)
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


class _Starter:
    def __init__(self, job: Job, launcher: Launcher, jobs: Path, library: Path, python: Path) -> None:
        self.job, self.launcher, self.jobs, self.library, self.python = job, launcher, jobs, library, python

    def attach_or_start(self) -> str:
        """Return the run to follow."""
        state = read_state(self.jobs / f"{self.job.name}.json")
        if self.launcher.alive(self.job):
            if state.get("state") == "running" and state.get("digest") == self.job.digest:
                return str(state["run"])
            self.launcher.stop(self.job)
        run = uuid.uuid4().hex
        self.start(run, 1)
        return run

    def start(self, run: str, attempt: int) -> None:
        """Write spec, secrets and first state, then start the unit."""
        if self.launcher.alive(self.job):
            return
        base = self.jobs / self.job.name
        secrets = base.with_name(f"{self.job.name}.secrets.json")
        spec = base.with_name(f"{self.job.name}.spec.json")
        state = base.with_name(f"{self.job.name}.json")
        now = time.time()
        write_json(secrets, self.job.secrets, mode=0o600)
        write_json(spec, {"spec": self.job.spec, "state": str(state), "secrets": str(secrets)}, mode=0o600)
        write_json(
            state,
            {
                "name": self.job.name,
                "worker": self.job.worker,
                "run": run,
                "attempt": attempt,
                "digest": self.job.digest,
                "state": "running",
                "phase": "starting",
                "started": now,
                "updated": now,
            },
        )
        command = [str(self.python), "-m", f"octoserve.{self.job.worker}", str(spec)]
        try:
            self.launcher.start(self.job, command, {"PYTHONPATH": str(self.library)})
        except JobError:
            secrets.unlink()
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that two controllers do not start the same job."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replaced(job: Job, state: dict[str, Any]) -> str:
    if not state:
        return f"the state of job {job.name} is gone; run the playbook again"
    return (
        f"job {job.name} was started anew by someone else (run {state.get('run')}); "
        "run the playbook again to attach to it"
    )


def _late(job: Job, state: dict[str, Any]) -> str:
    return (
        f"job {job.name} was not finished within {job.timeout} s and was ended in phase {state.get('phase')!r}; "
        f"see 'journalctl -u {job.unit}'"
    )


def _died(job: Job, state: dict[str, Any], attempts: int) -> str:
    return (
        f"job {job.name} died {attempts} times without a word, last in phase {state.get('phase')!r}; "
        f"see 'journalctl -u {job.unit}' and the kernel log (out of memory?)"
    )


# --- what a person reads -----------------------------------------------------------------------


def _progress(state: dict[str, Any]) -> dict[str, Any]:
    progress = {key: state.get(key) for key in _PROGRESS_KEYS}
    progress["text"] = describe(progress)
    return progress


def describe(progress: dict[str, Any]) -> str:
    """Return one line: phase, percent, amount, rate, time left; what is not known is left out."""
    parts = [str(progress.get("phase") or "starting")]
    done, total, rate, eta = (progress.get(key) for key in ("done", "total", "rate", "eta"))
    in_bytes = progress.get("unit") == "bytes"
    if done is not None and total:
        parts.append(f"{100 * done / total:.0f} %")
        amount = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB" if in_bytes else f"{done} of {total}"
        parts.append(amount if in_bytes else f"{amount} {progress.get('unit')}")
    if rate and in_bytes:
        parts.append(f"{rate / 1e6:.0f} MB/s")
    if eta is not None:
        minutes, seconds = divmod(round(eta), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append((f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s") + " left")
    return ", ".join(parts)


# --- the worker's side -------------------------------------------------------------------------


class Progress:
    """Reports a worker's progress into the state file, at most two writes a second."""

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        """Continue the state that the starter wrote."""
        self._path, self._state = path, state
        self._written = 0.0
        self._done = 0
        self._history: deque[tuple[float, int]] = deque()

    def phase(self, name: str, total: int | None = None, unit: str = "bytes", done: int = 0) -> None:
        """Begin a phase of `total` units (None: not known), or go on with one where `done` are done."""
        self._done = done
        self._history.clear()
        self._state.update(phase=name, done=done if total is not None else None, total=total)
        self._state.update(unit=unit if total is not None else None, rate=None, eta=None)
        self._write()

    def advance(self, amount: int) -> None:
        """Add to what is done in this phase."""
        self.at(self._done + amount)

    def at(self, done: int) -> None:
        """Set what is done in this phase."""
        self._done = done
        now = time.monotonic()
        if now - self._written >= _WRITE_INTERVAL:
            self._state.update(done=done, **self._speed(now))
            self._write()

    def finish(self, result: dict[str, Any]) -> None:
        """Write the last word of a job that succeeded."""
        if self._state.get("total") is not None:
            self._state["done"] = self._state["total"]
        self._state.update(state="done", result=result, eta=None)
        self._write(durable=True)

    def fail(self, error: str) -> None:
        """Write the last word of a job that failed."""
        self._state.update(state="failed", error=error, eta=None)
        self._write(durable=True)

    def _speed(self, now: float) -> dict[str, float | None]:
        self._history.append((now, self._done))
        while now - self._history[0][0] > _RATE_WINDOW:
            self._history.popleft()
        then, before = self._history[0]
        if now <= then or self._done <= before:
            return {"rate": None, "eta": None}
        rate = (self._done - before) / (now - then)
        total = self._state.get("total")
        return {"rate": rate, "eta": None if total is None else max(0.0, (total - self._done) / rate)}

    def _write(self, durable: bool = False) -> None:
        self._written = time.monotonic()
        self._state["updated"] = time.time()
        write_json(self._path, self._state, durable=durable)


Work = Callable[[dict[str, Any], dict[str, Any], Progress], dict[str, Any]]


def main(work: Work, arguments: list[str] | None = None) -> int:
    """Run a worker on the spec file in the arguments, record its result or error, return the exit code."""
    (name,) = sys.argv[1:] if arguments is None else arguments
    order = json.loads(Path(name).read_text())
    state_path, secrets_path = Path(order["state"]), Path(order["secrets"])
    progress = Progress(state_path, read_state(state_path))
    try:
        secrets = json.loads(secrets_path.read_text())
        secrets_path.unlink()
        progress.finish(work(order["spec"], secrets, progress))
    except WorkerError as error:
        progress.fail(str(error))
        sys.stderr.write(f"{error}\n")
        return 1
    except Exception as error:
        traceback.print_exc()
        progress.fail(f"{type(error).__name__}: {error} (a mistake in the worker; its journal has the traceback)")
        return 1
    return 0
