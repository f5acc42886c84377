"""Long jobs: start, attach, restart after a silent death, results, errors, secrets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from octoserve import job
from octoserve.job import Job, JobError, Outcome, Progress, follow

LIBRARY = Path(job.__file__).parents[1]

# What the tests run as workers; each is one module of a package laid out as on the host.
WORKERS = {
    "adder": "return {'sum': sum(spec['numbers'])}",
    "refuser": "raise job.WorkerError('found 1, wanted 2')",
    "breaker": "return {'value': spec['absent']}",
    "teller": "return {'token': secrets['token'], 'left': os.listdir(os.path.dirname(sys.argv[1]))}",
    "waiter": "open(spec['fifo']).read(); return {'waited': True}",
    "dier": "os.kill(os.getpid(), 9)",
    "resumer": (
        "marker = spec['marker']\n"
        "    if not os.path.exists(marker):\n"
        "        open(marker, 'w').close(); os.kill(os.getpid(), 9)\n"
        "    return {'resumed': True}"
    ),
}


class Processes:
    """Stands in for systemd: a unit is a child process of the test."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, work: Job, command: list[str], environment: dict[str, str]) -> None:
        self.started.append(command)
        self.running[work.unit] = subprocess.Popen(
            command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL
        )

    def alive(self, work: Job) -> bool:
        return work.unit in self.running and self.running[work.unit].poll() is None

    def stop(self, work: Job) -> None:
        self.running[work.unit].kill()
        self.running[work.unit].wait(10)


class Host:
    """A jobs folder, a library with the workers above, and a launcher."""

    def __init__(self, root: Path) -> None:
        self.jobs, self.library, self.launcher = root / "jobs", root / "lib", Processes()
        package = self.library / "octoserve"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "job.py").write_text(Path(job.__file__).read_text())
        for name, body in WORKERS.items():
            (package / f"{name}.py").write_text(
                "import os, sys\nfrom . import job\n"
                f"def work(spec, secrets, progress):\n    {body}\n"
                "sys.exit(job.main(work))\n"
            )

    def follow(self, work: Job, run: str | None = None, wait: float = 20.0) -> Outcome:
        python = Path(sys.executable)
        return follow(work, run, wait, launcher=self.launcher, jobs=self.jobs, library=self.library, python=python)

    def state(self, work: Job) -> dict[str, Any]:
        return job.read_state(self.jobs / f"{work.name}.json")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(job, "_POLL", 0.02)
    return Host(tmp_path)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_result_comes_back(host: Host) -> None:
    outcome = host.follow(Job("sum", "adder", {"numbers": [1, 2, 3]}))
    assert (outcome.finished, outcome.error, outcome.result) == (True, None, {"sum": 6})


def test_first_call_starts_anew_after_a_finished_job(host: Host) -> None:
    """Whether work is needed is the module's question; a stale result must never answer it."""
    work = Job("sum", "adder", {"numbers": [1]})
    first, second = host.follow(work), host.follow(work)
    assert first.run != second.run
    assert len(host.launcher.started) == 2


def test_unfinished_job_is_attached_to_and_followed(host: Host, fifo: Path) -> None:
    work = Job("wait", "waiter", {"fifo": str(fifo)})
    first = host.follow(work, wait=0)
    assert not first.finished
    again = host.follow(work, wait=0)
    assert again.run == first.run, "a second controller must attach, not start"
    fifo.write_text("go")
    last = host.follow(work, first.run)
    assert last.result == {"waited": True}
    assert len(host.launcher.started) == 1


def test_changed_spec_stops_the_old_job(host: Host, fifo: Path) -> None:
    old = Job("wait", "waiter", {"fifo": str(fifo)})
    first = host.follow(old, wait=0)
    process = host.launcher.running[old.unit]
    outcome = host.follow(Job("wait", "adder", {"numbers": [4]}))
    assert outcome.result == {"sum": 4}
    assert process.returncode == -signal.SIGKILL
    assert "someone else" in str(host.follow(old, first.run).error)


def test_operator_error_is_passed_on_word_for_word(host: Host) -> None:
    outcome = host.follow(Job("refuse", "refuser", {}))
    assert outcome.finished
    assert outcome.error == "found 1, wanted 2"


def test_fault_of_a_worker_is_named_as_one(host: Host) -> None:
    outcome = host.follow(Job("break", "breaker", {}))
    assert outcome.error is not None
    assert outcome.error.startswith("KeyError: 'absent'")


def test_silent_death_is_resumed(host: Host, tmp_path: Path) -> None:
    work = Job("resume", "resumer", {"marker": str(tmp_path / "marker")})
    outcome = host.follow(work)
    assert outcome.result == {"resumed": True}
    assert host.state(work)["attempt"] == 2


def test_repeated_silent_death_ends(host: Host) -> None:
    work = Job("die", "dier", {})
    outcome = host.follow(work)
    assert outcome.finished
    assert f"died {job.MAX_ATTEMPTS} times" in str(outcome.error)
    assert len(host.launcher.started) == job.MAX_ATTEMPTS


def test_a_job_that_was_ended_at_its_timeout_is_not_started_again(host: Host) -> None:
    work = Job("late", "dier", {}, timeout=0)
    outcome = host.follow(work)
    assert outcome.finished
    assert "job late was not finished within 0 s and was ended in phase 'starting'" in str(outcome.error)
    assert len(host.launcher.started) == 1


def test_state_left_running_by_a_reboot_is_started_again(host: Host) -> None:
    work = Job("sum", "adder", {"numbers": [5]})
    host.jobs.mkdir()
    job.write_json(host.jobs / "sum.json", {"state": "running", "run": "old", "digest": work.digest, "attempt": 1})
    assert host.follow(work).result == {"sum": 5}


def test_secrets_reach_the_worker_and_no_file_keeps_them(host: Host) -> None:
    work = Job("tell", "teller", {}, secrets={"token": "hf_secret"})
    outcome = host.follow(work)
    assert outcome.result["token"] == "hf_secret"
    assert "tell.secrets.json" not in outcome.result["left"]
    assert "hf_secret" not in repr(work)
    assert all("hf_secret" not in argument for argument in host.launcher.started[0])
    spec = host.jobs / "tell.spec.json"
    assert "hf_secret" not in spec.read_text()
    assert spec.stat().st_mode & 0o777 == 0o600


def test_secrets_do_not_change_the_digest() -> None:
    assert Job("a", "adder", {"x": 1}).digest == Job("a", "adder", {"x": 1}, secrets={"token": "t"}).digest
    assert Job("a", "adder", {"x": 1}).digest != Job("a", "adder", {"x": 2}).digest


@pytest.mark.parametrize("name", ["", "../x", "a b", "-a", "a\n"])
def test_bad_name_is_refused(name: str) -> None:
    with pytest.raises(JobError, match="job name"):
        Job(name, "adder", {})


def test_missing_systemd_is_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JobError, match="long jobs need systemd"):
        follow(Job("sum", "adder", {}), jobs=host.jobs)


def test_progress_is_throttled_and_has_rate_and_eta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("octoserve.job.time.monotonic", lambda: clock[0])
    path = tmp_path / "state.json"
    progress = Progress(path, {"state": "running"})
    progress.phase("downloading", 1000)
    writes = []
    monkeypatch.setattr(job, "write_json", lambda *a, **k: writes.append(json.loads(json.dumps(a[1]))))
    for step in range(1, 41):
        clock[0] = 100 + step / 20
        progress.at(step * 10)
    assert len(writes) == 4, "40 reports in 2 s, one write each 0.5 s"
    assert writes[-1]["done"] == 400
    assert writes[-1]["rate"] == pytest.approx(200)
    assert writes[-1]["eta"] == pytest.approx(3)


def test_description_reads_well_and_leaves_out_what_is_unknown() -> None:
    known = {"phase": "merging", "done": 201_000_000_000, "total": 402_000_000_000, "unit": "bytes"}
    assert job.describe(known) == "merging, 50 %, 201.00 of 402.00 GB"
    assert job.describe({**known, "rate": 2.1e9, "eta": 95.7}).endswith("2100 MB/s, 1 min 36 s left")
    assert job.describe({"phase": "installing", "done": 3, "total": 4, "unit": "packages", "eta": 7200}) == (
        "installing, 75 %, 3 of 4 packages, 2 h 0 min left"
    )
    assert job.describe({}) == "starting"
