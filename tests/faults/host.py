"""A sandbox host and the service on it, seen from outside: what a fault is injected with and judged by."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octoserve.openai_api import ApiError, Client

ROOT = Path(__file__).resolve().parents[2]
SANDBOX = ROOT / ".cache/sandbox"
UNIT = "octoserve-main.service"
DEPLOYMENTS = "/var/lib/octoserve/deployments/main"
STUB_STATE = "/etc/octoserve-nvml-stub.state"
EIGHT_CARDS = (ROOT / "tests/fixtures/nvml_stub/rtx_pro_6000_x8.state").read_text()
CONTROL = "/run/fake_engine.json"
POLL_S = 0.2
PROPERTIES = ("ActiveState", "SubState", "Result", "NRestarts", "InvocationID", "MainPID", "ControlGroup")


class FaultError(AssertionError):
    """A fault did not end as it must; the message says what was seen."""


@dataclass
class Host:
    """``name`` as in the scenario's inventory; ``address`` also of the service; ``model`` as it is served."""

    name: str
    address: str
    model: str = "fake"
    port: int = 8000
    before: str = ""  # the service's invocation before the fault

    def run(self, script: str, *, check: bool = True) -> str:
        """Run a shell script as root on the host and return what it says."""
        key = ["-i", str(SANDBOX / "id_ed25519"), "-p", "2222", "-o", f"UserKnownHostsFile={SANDBOX / 'known_hosts'}"]
        once = ["-o", "GlobalKnownHostsFile=/dev/null", "-o", "ControlPath=none", "-o", "ConnectTimeout=5"]
        command = ["ssh", *key, *once, f"admin@{self.address}", f"sudo sh -c {shlex.quote(script)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if check and done.returncode != 0:
            raise FaultError(f"{script!r} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def write(self, path: str, text: str) -> None:
        """Replace a file, by a rename."""
        self.run(f"printf %s {shlex.quote(text)} > {path}.new && chmod 644 {path}.new && mv {path}.new {path}")

    def unit(self) -> dict[str, str]:
        """What systemd says of the service."""
        shown = self.run(f"systemctl show --property={','.join(PROPERTIES)} {UNIT}")
        return dict(line.split("=", 1) for line in shown.splitlines())

    def processes(self) -> dict[int, str]:
        """Names of the service's processes by PID; the main process is `server`."""
        found, main = {}, self.unit()["MainPID"]
        for line in self.run("ps -eo pid=,unit=,comm=").splitlines():
            pid, unit, name = line.split(None, 2)
            if unit == UNIT:
                found[int(pid)] = "server" if pid == main else name
        return found

    def kill(self, signal: str, *names: str) -> None:
        """Send a signal to processes whose names begin so."""
        pids = [str(pid) for pid, name in self.processes().items() if name.startswith(names)]
        if not pids:
            raise FaultError(f"the service has no process {names}: {self.processes()}")
        self.run(f"kill -{signal} {' '.join(pids)}")

    def control(self, **settings: Any) -> None:
        """Tell the fake engine how to behave from now on; nothing: as it was started."""
        if settings:
            self.write(CONTROL, json.dumps(settings))
        else:
            self.run(f"rm -f {CONTROL}")

    def cards(self, *lines: str) -> None:
        """Change the stub's cards; nothing: eight free ones."""
        self.write(STUB_STATE, EIGHT_CARDS + "".join(f"{line}\n" for line in lines))

    def answer(self, timeout_s: float = 3.0) -> str | None:
        """What it answers to the gates' first question, None where it does not."""
        client = Client(f"http://{self.address}:{self.port}", self.model, timeout=timeout_s)
        try:
            question = {"role": "user", "content": "What is the capital of France?"}
            return client.chat([question], max_tokens=16, temperature=0).text
        except ApiError:
            return None

    def journal(self, since: str) -> str:
        """The service's journal from a moment on, as `now` gives it."""
        return self.run(f"journalctl -u {UNIT} --output=cat --no-pager --since={shlex.quote(since)}")

    def now(self) -> str:
        """The host's clock, as journalctl takes it."""
        return "@" + self.run("date +%s.%N").strip()[:17]

    def state(self) -> dict[str, Any]:
        """Deployments: which is current, and the state of each."""
        script = f"cd {DEPLOYMENTS} && readlink current; for f in [0-9]*/state.json; do echo $f $(cat $f); done"
        link, *lines = self.run(script).splitlines()
        states = {int(line.split("/")[0]): json.loads(line.split(" ", 1)[1])["state"] for line in lines}
        return {"current": int(link), "states": states}

    def fresh(self) -> None:
        """As after a deploy: cards free, engine well-behaved, no failures counted, serving."""
        if self.model == "fake":
            self.cards()
            self.control()
        self.run(f"systemctl reset-failed {UNIT}; systemctl start {UNIT}")
        self.until("it serves again", 120, lambda: self.answer() is not None)

    def until(self, what: str, bound_s: float, is_so: Callable[[], bool]) -> float:
        """Wait until something is so, and return the seconds it took. Raises FaultError after the bound."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(FaultError, subprocess.TimeoutExpired):  # a host that is booting has no SSH
                if is_so():
                    return time.monotonic() - began
            if time.monotonic() - began > bound_s:
                raise FaultError(f"not within {bound_s:.0f} s: {what}; {self._told()}")
            time.sleep(POLL_S)

    def _told(self) -> str:
        try:
            words = self.run(f"journalctl -u {UNIT} --output=cat --no-pager --lines=8")
            return f"unit {self.unit()}, processes {self.processes()}, journal: {words}"
        except (FaultError, subprocess.TimeoutExpired) as error:
            return f"no SSH: {error}"

    def sandbox(self, action: str) -> None:
        """Start or stop the host itself with files/sandbox/nspawn_host.py."""
        program = ROOT / "files/sandbox/nspawn_host.py"
        options = [f"--name={self.name}", f"--tree={self.tree}", f"--address={self.address}", "--port=2222"]
        bind = [f"--bind={ROOT / 'tests/fixtures'}:/srv/fixtures"] if action == "start" else []
        subprocess.run([sys.executable, program, action, *options, *bind], check=True, stdout=subprocess.DEVNULL)

    @property
    def tree(self) -> Path:
        """The host's files, seen from this machine."""
        return SANDBOX / "hosts" / self.name

    def cut_power(self) -> None:
        """Kill the host at once: every process of it, without a word. (The page cache survives: no fsync is tested.)"""
        sys.path.append(str(ROOT / "files/sandbox"))
        import nspawn_host

        leader = nspawn_host.leader_of(nspawn_host.processes_in(self.tree))
        if leader is None:
            raise FaultError(f"{self.name} does not run")
        subprocess.run(["kill", "-KILL", str(leader)], check=True)
        if not nspawn_host.wait_until_empty(self.tree, 30):
            raise FaultError(f"{self.name} still has processes: {nspawn_host.processes_in(self.tree)}")

    def left_behind(self) -> list[str]:
        """What must not be there while nothing is under way: unfinished files, stray processes and shared memory."""
        unfinished = " -o ".join(f"-name '*.{end}'" for end in ("partial", "going", "part", "new", "merging"))
        places = "/opt/octoserve /var/lib/octoserve /etc/octoserve /etc/systemd/system"
        found = self.run(f"find {places} \\( {unfinished} \\) -print | grep -v /site-packages/", check=False).split()
        user = self.run("ps -o pid= -u octoserve", check=False).split()
        strays = set(map(int, user)) - set(self.processes())
        stale = self.run(
            "for f in $(find /dev/shm -type f -user octoserve); do grep -qsF $f /proc/[0-9]*/maps"
            " || ls -l /proc/[0-9]*/fd 2>/dev/null | grep -qF $f || echo $f; done",
            check=False,
        )
        return [*found, *(f"process {pid}" for pid in strays), *stale.split()]


def journal_says(host: Host, since: str, *words: str) -> None:
    """Raise FaultError unless the journal names all of these."""
    text = host.journal(since)
    missing = [word for word in words if word not in text]
    if missing:
        raise FaultError(f"the journal does not say {missing}: {text[-2000:]}")
