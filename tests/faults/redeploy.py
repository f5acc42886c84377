"""Faults that a redeploy meets. The host ends better or as it was, and the next run mends the rest."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from tests.faults.host import ROOT, FaultError, Host

INVENTORY = ROOT / "tests/molecule/redeploy/inventory"
MODEL = "/var/lib/octoserve/models/fake/tiny-glm-00002-of-00003.gguf"
RELEASES = "/opt/octoserve/releases"
MODELS = "/var/lib/octoserve/models"
BY_HAND, BY_HAND_PORT = "/srv/by-hand", 8100
BY_HAND_UNIT = """\
[Service]
ExecStart={python} -m vllm.entrypoints.cli.main serve {model} --host {address} --port {port} --served-model-name merged
Restart=always

[Install]
WantedBy=multi-user.target
"""
#: Seconds after which a run is ended. The first one that merges builds the tool for it: minutes.
TIMEOUT_S = 900
#: Seconds that a run of site.yml may take on the fake engine: 15 to 80 on two idle cores, twice that beside other work.
RUN_S = 150
#: About as many tasks as a run has, for the random kills.
TASKS = 110
OLD, NEW = "fake", "better"
#: By profile, as tests/fixtures/fake_engine/make.py makes them.
STACKS = {OLD: "fake-1", NEW: "fake-2"}
NEXT, PROVEN = "the next run goes on", "what was proven serves, the next run goes on"
BACK = "the one before is back and proven"
#: Removes every release that no process runs from, so that there is something to install.
FORGET = f"""cd {RELEASES} && for r in *; do
    systemctl show --property=ExecStart octoserve-main | grep -q "/$r/" || rm -rf "$r"; done"""


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code, and what it said."""

    code: int
    output: str


class Run:
    """A run of ansible-playbook or of scripts/redeploy.py in a process group of its own."""

    def __init__(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        where = {**os.environ, "PIP_FIND_LINKS": str(ROOT / ".cache/fake_engine/wheels"), "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**where, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.timer = threading.Timer(TIMEOUT_S, self._end_now)
        self.timer.daemon = True
        self.timer.start()
        self.lines: list[str] = []

    @property
    def _stdout(self) -> IO[str]:
        if self.process.stdout is None:
            raise FaultError("the run has no output")
        return self.process.stdout

    def tasks(self) -> Iterator[str]:
        """Names of its tasks, each as it begins."""
        for line in self._stdout:
            self.lines.append(line)
            if line.startswith("TASK ["):
                yield line.removeprefix("TASK [").partition("]")[0]

    def until(self, task: str) -> None:
        """Read until a task begins whose name holds this text. Raises FaultError where none does."""
        if not any(task in name for name in self.tasks()):
            raise FaultError(f"no task {task!r}: {''.join(self.lines)[-1500:]}")

    def kill(self) -> None:
        """End the controller as a power cut of its machine would: every process, without a word."""
        self.timer.cancel()
        self._end_now()
        self.process.wait()

    def _end_now(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> Ended:
        """Wait for the end; a run that takes longer than TIMEOUT_S is ended, and its code is -9."""
        for line in self._stdout:
            self.lines.append(line)
        self.timer.cancel()
        code = self.process.wait(60)
        return Ended(code, "".join(self.lines))


def redeploy(profile: str, *options: str, environment: Mapping[str, str] | None = None) -> Run:
    """scripts/redeploy.py of a profile, with --always unless there are options."""
    words = [sys.executable, str(ROOT / "scripts/redeploy.py"), *(options or ("-i", str(INVENTORY), "--always"))]
    return Run(*words, "--", "-e", f"octoserve_profile={profile}", environment=environment)


def playbook(name: str, *options: str) -> Run:
    """A playbook, as anyone would run it."""
    return Run("ansible-playbook", name, "-i", str(INVENTORY), *options)


def ends(run: Run, code: int, *words: str) -> Ended:
    """Wait, and raise FaultError unless it ends with this code and says all of these."""
    ended = run.end()
    said = " ".join(ended.output.split())  # Ansible breaks long lines
    missing = [word for word in words if word not in said]
    if ended.code != code or missing:
        raise FaultError(f"ended with {ended.code}, wanted {code} and {missing}: {ended.output[-3000:]}")
    return ended


def serves(host: Host, profile: str) -> None:
    """The current deployment is of this profile, passed, and answers right."""
    state = host.state()
    record = host.run(f"cat /var/lib/octoserve/deployments/main/{state['current']:04d}/deployment.json")
    if f'"profile": "{profile}"' not in record or state["states"][state["current"]] != "passed":
        raise FaultError(f"wanted {profile} to serve, found {state} {record[-300:]}")
    host.until(f"{profile} answers right", 30, lambda: "Paris" in (host.answer() or ""))


@dataclass(frozen=True)
class Case:
    """``meet`` injects the fault and judges how it ended. ``short``: part of `make test`.

    ``runs``: how many runs of a playbook it makes, from which its bound follows.
    """

    name: str
    ends: str
    meet: Callable[[Host], Any]
    short: bool = False
    runs: int = 2

    @property
    def bound_s(self) -> float:
        """Seconds that it may take."""
        return self.runs * RUN_S


def serving(host: Host) -> str:
    """The profile of the current deployment."""
    record = host.run("cat /var/lib/octoserve/deployments/main/current/deployment.json")
    return str(json.loads(record)["profile"])


def another(host: Host) -> str:
    """A good profile that does not serve now."""
    return NEW if serving(host) == OLD else OLD


def unchanged(host: Host) -> None:
    """A run without a change."""
    before = host.unit()["InvocationID"]
    ends(redeploy(serving(host), "-i", str(INVENTORY)), 0, "nothing to do", "0 changes")
    if host.unit()["InvocationID"] != before:
        raise FaultError("it was restarted")


def rolled_back(profile: str, phase: str) -> Callable[[Host], None]:
    """A deployment that does not pass, and the one before it afterwards."""

    def meet(host: Host) -> None:
        before, good = host.state()["current"], serving(host)
        ends(redeploy(profile), 15, f"Deployment {before}, which served before, is back", phase)
        after = host.state()
        if after["current"] != before or after["states"][max(after["states"])] != "failed":
            raise FaultError(f"deployment {before} served, now {after}")
        serves(host, good)

    return meet


def better_and_back(host: Host) -> None:
    """A good deployment on another release, and the way back by hand."""
    before, old, new = host.state()["current"], serving(host), another(host)
    ends(redeploy(new), 0)
    serves(host, new)
    ends(playbook("playbooks/rollback.yml"), 0)
    serves(host, old)
    if host.state()["current"] != before:
        raise FaultError(f"wanted {before} back, found {host.state()}")


def second_run(host: Host) -> None:
    """A second run while the first one loads a model: it is refused, and names the first."""
    first = redeploy("loading")
    first.until("Wait for a real completion")
    second = Run("ansible-playbook", "site.yml", "-i", str(INVENTORY), "-e", "octoserve_lock_timeout=2")
    ended = second.end()
    if ended.code == 0 or "this host is locked by" not in ended.output or "site.yml" not in ended.output:
        raise FaultError(f"wanted it refused, found {ended.code}: {ended.output[-2000:]}")
    ends(first, 0)
    serves(host, "loading")


def killed_at(task: str) -> Callable[[Host], None]:
    """The controller dies when a task begins; the next run mends."""

    def meet(host: Host) -> None:
        new = another(host)
        host.run(FORGET)
        run = playbook("site.yml", "-e", f"octoserve_profile={new}")
        run.until(task)
        time.sleep(1)
        run.kill()
        # As CI would: it must see by itself that there is something to do.
        ends(redeploy(new, "-i", str(INVENTORY)), 0)
        serves(host, new)

    return meet


def cut_power(host: Host, run: Run, task: str) -> None:
    """The host loses its power when a task of a run begins, and is switched on again."""
    run.until(task)
    time.sleep(0.5)
    host.cut_power()
    host.sandbox("start")
    run.end()


def power_cut_at(task: str) -> Callable[[Host], None]:
    """The host loses its power when a task begins; after boot what was proven serves, and the next run mends."""

    def meet(host: Host) -> None:
        old, new = serving(host), another(host)
        host.run(FORGET)
        cut_power(host, playbook("site.yml", "-e", f"octoserve_profile={new}"), task)
        serves(host, old)
        ends(redeploy(new), 0)
        serves(host, new)

    return meet


def power_cut_in_rollback(host: Host) -> None:
    """The host loses its power on the way back: both deployments are proven, and the next run comes to the end."""
    before, old, new = host.state()["current"], serving(host), another(host)
    ends(redeploy(new), 0)
    back = ("playbooks/rollback.yml", "-e", f"octoserve_deployment={before}")
    cut_power(host, playbook(*back), "Write the unit")
    host.until("one of the two answers right", 30, lambda: "Paris" in (host.answer() or ""))
    ends(playbook(*back), 0)
    serves(host, old)


def model_truncated(host: Host) -> None:
    """A file of the model lost its end; a redeploy fetches it again."""
    good = serving(host)
    host.run(f"truncate -s 100 {MODEL}")
    ends(redeploy(good), 0)
    serves(host, good)


@contextmanager
def edited(host: Host, release: str) -> Iterator[None]:
    """A patched file of a release, by the beginning of its name, that somebody edited."""
    path = f"$(echo {RELEASES}/{release}-*/lib/python3*/site-packages)/vllm/__init__.py"
    host.run(f"cp -p {path} /root/kept && echo '# edited' >> {path}")
    try:
        yield
    finally:
        host.run(f"mv /root/kept {path}")


def guard_refuses(host: Host) -> None:
    """A release that is edited before the start: the guard's word reaches whoever deployed, and the report."""
    good, new = serving(host), another(host)
    run = redeploy(new)
    run.until("Record what is deployed")
    with edited(host, STACKS[new]):
        ends(run, 15, "did not start: octoserve.guard_deployment: ", "vllm/__init__.py", "is back")
        serves(host, good)
    report = (ROOT / "reports" / host.name / "latest/junit.xml").read_text()
    if "octoserve.guard_deployment: " not in report:
        raise FaultError(f"the report does not name the guard: {report[:3000]}")
    ends(redeploy(new), 0)
    serves(host, new)


def card_lost_before_the_start(host: Host) -> None:
    """A card is lost after preflight: nothing can start; the message names the card, and a redeploy mends."""
    new = another(host)
    run = redeploy(new)
    run.until("Record what is deployed")
    host.cards("result 5 15")
    try:
        ends(run, 12, "did not start: octoserve.guard_gpu: Found: card 5 does not answer")
    finally:
        host.cards()
    ends(redeploy(new), 0)
    serves(host, new)


def back_to_an_edited_release(host: Host) -> None:
    """A way back by hand to a release that somebody edited: refused before anything is stopped."""
    old, new = serving(host), another(host)
    ends(redeploy(new), 0)
    before = host.unit()["InvocationID"]
    with edited(host, STACKS[old]):
        ends(playbook("playbooks/rollback.yml"), 2, "is not as it was recorded: ", "vllm/__init__.py")
        serves(host, new)
    if host.unit()["InvocationID"] != before:
        raise FaultError("it was restarted")


@contextmanager
def releases_on(host: Host, size: str) -> Iterator[None]:
    """The releases on a disk of this size."""
    host.run(
        f"mount -t tmpfs -o size={size},mode=755 tmpfs /mnt && cp -a {RELEASES}/. /mnt && mount --bind /mnt {RELEASES}"
    )
    try:
        yield
    finally:
        host.run(f"umount {RELEASES} /mnt")


def no_room(host: Host) -> None:
    """A disk that cannot take another release."""
    good = serving(host)
    host.run(FORGET)
    with releases_on(host, "100m"):
        ends(redeploy(another(host)), 10, "release")
    serves(host, good)


def disk_fills(host: Host) -> None:
    """A disk that fills while the release is installed."""
    good, new = serving(host), another(host)
    host.run(FORGET)
    with releases_on(host, "9g"):
        run = redeploy(new)
        run.until("Copy lock and patches")
        host.run(f"fallocate -l $(( $(df --output=avail -B1 {RELEASES} | tail -n 1) - 100000 )) {RELEASES}/filler")
        ends(run, 11, "No space left")
        serves(host, good)
    ends(redeploy(new), 0)
    serves(host, new)


def no_room_for_reports(host: Host) -> None:
    """The controller cannot write its report; the deployment stands all the same, and the run says what is missing."""
    new = another(host)
    folder = Path("/run/octoserve-no-room")
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)], check=True)
    try:
        ends(redeploy(new, environment={"OCTOSERVE_REPORTS": str(folder)}), 1, "no report of", "no report was written")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
    serves(host, new)


def adopted(host: Host) -> None:
    """A host that was set up by hand: its file is used in place, its unit comes back where a deploy does not pass."""
    others = ["-e", "octoserve_instance=adopted", "-e", f"octoserve_port={BY_HAND_PORT}"]
    at_port, moved, unit = replace(host, model="merged", port=BY_HAND_PORT), f"{BY_HAND}/merged.gguf", "by-hand.service"

    def run(name: str, profile: str, *options: str) -> Run:
        return playbook(name, "-e", f"octoserve_profile={profile}", *others, *options)

    def stands() -> str:
        return " ".join(host.run(f"systemctl is-active {unit}; systemctl is-enabled {unit}", check=False).split())

    def wants(what: str, found: str, wanted: str) -> None:
        if found != wanted:
            raise FaultError(f"{what}: found {found}, wanted {wanted}")

    ends(run("site.yml", "merged", "--tags", "preflight,model"), 0)
    release = host.run("systemctl show --property=ExecStart octoserve-main").partition("path=")[2].split(" ", 1)[0]
    text = BY_HAND_UNIT.format(python=release, model=moved, address=host.address, port=BY_HAND_PORT)
    host.run(f"mkdir -p {BY_HAND} && mv {MODELS}/merged/tiny-glm.gguf {moved} && rm -rf {MODELS}/merged")
    host.write(f"/etc/systemd/system/{unit}", text)
    host.run(f"systemctl daemon-reload && systemctl enable --now {unit}")
    host.until("what was set up by hand serves", 30, lambda: "Paris" in (at_port.answer() or ""))
    try:
        inode = host.run(f"stat -c %i {moved}")
        ends(
            run("playbooks/adopt.yml", "merged"), 0, f"octoserve_adopt_unit: {unit}", f"gguf_model_merged_path: {moved}"
        )
        wants("adopt.yml leaves it alone", stands(), "active enabled")
        others += ["-e", f"octoserve_adopt_unit={unit}", "-e", f"gguf_model_merged_path={moved}"]
        ends(run("site.yml", "merged_wrong"), 2, f"{unit}, which was set up by hand, was started again")
        wants("after a deploy that failed", stands(), "active enabled")
        host.until("what was set up by hand serves again", 30, lambda: "Paris" in (at_port.answer() or ""))
        cut_power(host, run("site.yml", "merged"), "Ask the questions")
        host.until("what was set up by hand serves after a power cut", 60, lambda: "Paris" in (at_port.answer() or ""))
        wants("after a power cut during the gates", stands(), "active enabled")
        ends(run("site.yml", "merged"), 0)
        # A server that does not end well when it is told to counts as failed; it is stopped all the same.
        wants("after the deploy", stands().replace("failed", "inactive"), "inactive disabled")
        wants(
            "the file", host.run(f"stat -c %i {moved}; ls {MODELS}/merged | grep -c gguf", check=False), f"{inode}0\n"
        )
        host.until("the deployment serves", 30, lambda: "Paris" in (at_port.answer() or ""))
        again = run("site.yml", "merged", "--check")
        wants("changes of a second run", re.findall(r"changed=(\d+)", ends(again, 0).output)[-1], "0")
    finally:
        ends(run("playbooks/remove.yml", "merged"), 0)
        host.run(f"systemctl disable --now {unit}; rm -rf /etc/systemd/system/{unit} {BY_HAND} {MODELS}/merged")
    if left := host.run("ls -d /etc/systemd/system/octoserve-adopted* /etc/octoserve/adopted*", check=False):
        raise FaultError(f"remove.yml left {left}")
    serves(host, serving(host))


CASES = [
    Case("a run without a change", "nothing is done", unchanged, short=True, runs=1),
    Case("a deployment that answers wrong", BACK, rolled_back("wrong", "coherence"), short=True, runs=1),
    Case("a deployment that is too slow", BACK, rolled_back("slow", "throughput"), runs=1),
    Case("a deployment that does not start", BACK, rolled_back("broken", "start"), runs=1),
    Case("a fabric that gives wrong values", BACK, rolled_back("crossed", "values of an all-reduce"), runs=1),
    Case("a release that is edited before the start", "the one before is back; names the file", guard_refuses),
    Case("a card that is lost before the start", "nothing starts, names the card", card_lost_before_the_start),
    Case("a way back by hand to an edited release", "refused; the current one serves on", back_to_an_edited_release),
    Case("a good deployment, and back by hand", "each serves in its turn", better_and_back, short=True),
    Case("a second run at the same time", "refused, names the first; the first ends well", second_run, short=True),
    Case("the controller dies while it installs", NEXT, killed_at("Install, patch, compile")),
    Case("the controller dies before the restart", NEXT, killed_at("Write the unit"), short=True),
    Case("the controller dies during the gates", NEXT, killed_at("Measure the decode rate")),
    Case("a power cut during preflight", PROVEN, power_cut_at("Read the cards")),
    Case("a power cut while it installs", PROVEN, power_cut_at("Install, patch")),
    Case("a power cut during a start", PROVEN, power_cut_at("Wait for a real"), short=True),
    Case("a power cut during the gates", PROVEN, power_cut_at("Ask the questions")),
    Case("a power cut during a rollback", PROVEN, power_cut_in_rollback, runs=3),
    Case("a truncated file of the model", "fetched again", model_truncated, runs=1),
    Case("no room for a release", "found in preflight, nothing touched", no_room, runs=1),
    Case(
        "a disk that fills during the installation", "fails there, the old one serves; the next run goes on", disk_fills
    ),
    Case(
        "a host that was set up by hand",
        "its unit gives way, and comes back where the deploy fails or the power is cut",
        adopted,
        runs=10,  # seven, and the build of the tool that merges, which takes as long as three
    ),
    Case("no room for the report", "deployed; the run says what is missing", no_room_for_reports, runs=1),
]


def killed_at_random(seed: int) -> Callable[[Host], str]:
    """The controller dies at a task that a seed chooses; the next run mends. Tells the task."""

    def meet(host: Host) -> str:
        profile = (OLD, NEW)[seed % 2]
        task = _kill_at(random.Random(seed).randrange(1, TASKS), profile, random.Random(seed).random())
        ends(redeploy(profile), 0)
        serves(host, profile)
        return task

    return meet


def _kill_at(number: int, profile: str, pause_s: float) -> str:
    """Kill a run some time after its task of this number began. One that ended before is made once more."""
    while True:
        run, count = playbook("site.yml", "-e", f"octoserve_profile={profile}"), 0
        for count, name in enumerate(run.tasks(), 1):
            if count == number:
                time.sleep(pause_s)
                run.kill()
                return name
        ended = run.end()
        if ended.code != 0:
            raise FaultError(f"ended with {ended.code}: {ended.output[-3000:]}")
        number = number % count + 1


def at_random(seed: int) -> Case:
    """A kill of the controller at a random task."""
    return Case(f"the controller dies at a random task, seed {seed}", NEXT, killed_at_random(seed), runs=3)


def meet(host: Host, case: Case) -> Any:
    """Meet one fault; nothing may be left behind. Returns what it tells."""
    told = case.meet(host)
    if left := host.left_behind():
        raise FaultError(f"left behind: {left}")
    return told
