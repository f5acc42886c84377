"""The commands of daily work on a host that serves: status, stop, a deploy with a key, and at last remove.

No faults; in this order, since each begins where the one before it ended.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octoserve.openai_api import ApiError, Client

from tests.faults.host import ROOT, UNIT, FaultError, Host
from tests.faults.redeploy import MODELS, Case, Ended, Run, ends
from tests.faults.service import WATCHDOG

INVENTORY = ROOT / "tests/molecule/service/inventory"
#: Where a key could lie on a host; processes and the journal are looked at on their own.
PLACES = "/etc /home /opt/octoserve /root /run /tmp /var/lib/octoserve /var/log /var/tmp"
KEY_FILE, ENV = "root/key", "/etc/octoserve/main.env"
#: What remove.yml removes with the last instance.
OURS = (
    "/etc/systemd/system/octoserve* /etc/systemd/system/*/octoserve* /run/octoserve-* /opt/octoserve /etc/octoserve"
    " /var/cache/octoserve /etc/security/limits.d/octoserve.conf"
)


def ran(name: str, *words: str, options: tuple[str, ...] = ()) -> Ended:
    """A playbook that ends well and says this."""
    return ends(Run("ansible-playbook", name, "-i", str(INVENTORY), *options), 0, *words)


def wants(what: str, found: object, wanted: object) -> None:
    """Raise FaultError where the two differ."""
    if found != wanted:
        raise FaultError(f"{what}: found {found!r}, wanted {wanted!r}")


def watchdog_verdict(host: Host, verdict: str, after: float = 0.0) -> float:
    """Wait until the watchdog has seen this after a moment of the host's clock, and return when."""
    seen: dict[str, object] = {}

    def says() -> bool:
        seen.update(json.loads(host.run(f"cat {WATCHDOG}")))
        return seen["verdict"] == verdict and float(str(seen["at"])) > after

    host.until(f"the watchdog says {verdict}", 30, says)
    return float(str(seen["at"]))


def status(host: Host) -> None:
    """It says what runs, and changes nothing."""
    watchdog_verdict(host, "answers")
    told = ran(
        "playbooks/status.yml",
        f"{UNIT}: active (running) since",
        f"http://{host.address}:{host.port}: healthy",
        "watchdog: answers",
        "fake on fake-1",
        "(runs, current)",
    )
    wants("changes", re.findall(r"changed=(\d+)", told.output), ["0"])


def stopped(host: Host) -> None:
    """It stays down: its watchdog stops with it, and a boot starts neither."""
    both = f"systemctl is-active {UNIT} {UNIT.replace('.service', '-watchdog.timer')}"
    ran("playbooks/stop.yml")
    wants("units after a stop", host.run(both, check=False).split(), ["inactive", "inactive"])
    host.cut_power()
    host.sandbox("start")
    host.run("systemctl is-system-running --wait", check=False)
    wants("units after a boot", host.run(both, check=False).split(), ["inactive", "inactive"])
    wants("answer", host.answer(), None)
    ran(
        "playbooks/status.yml", f"{UNIT}: inactive (dead)", "disabled", "watchdog: has seen nothing since the last boot"
    )


@contextmanager
def no_argument_holds(text: str) -> Iterator[None]:
    """No process has this among its arguments, neither here nor on the host, whose processes are seen from here."""
    found: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):  # it ended meanwhile
                    words = path.read_bytes()
                    if text.encode() in words:
                        found.add(words.decode(errors="replace").replace("\0", " "))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
    if found:
        raise FaultError(f"the key is among the arguments of {sorted(found)}")


def refusal(host: Host, key: str | None) -> int | None:
    """HTTP status of a refused question, None where it is answered right."""
    client = Client(f"http://{host.address}:{host.port}", host.model, key, timeout=10)
    try:
        question = {"role": "user", "content": "What is the capital of France?"}
        wants("answer", "Paris" in client.chat([question], max_tokens=16, temperature=0).text, True)
    except ApiError as error:
        return error.status
    return None


def keyed(host: Host) -> None:
    """A deploy starts it again, with a key that stands in the environment file and nowhere else."""
    key = secrets.token_urlsafe(24)
    on_host = host.tree / KEY_FILE  # not over SSH: sudo writes what it runs into the journal
    on_host.write_text(key)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"octoserve_api_key": key}, file)
            file.flush()
            with no_argument_holds(key):
                told = ran("site.yml", options=("-e", f"@{file.name}"))
        wants("the key in what the run says", key in told.output, False)
        start = host.unit()["InvocationID"]
        watchdog_verdict(host, "answers", watchdog_verdict(host, "answers"))  # it asks with the key
        wants("who is answered", [refusal(host, one) for one in (key, "another", None)], [None, 401, 401])
        wants(
            "files with the key", host.run(f"grep -rlFf /{KEY_FILE} --exclude=key {PLACES}", check=False).split(), [ENV]
        )
        wants("its mode", host.run(f"stat -c '%U %a' {ENV}").split(), ["root", "600"])
        # With the arguments of who wrote each line.
        wants(
            "journal", host.run(f"journalctl --boot --output=export | grep -acFf /{KEY_FILE}", check=False).strip(), "0"
        )
        wants("unit", host.unit()["InvocationID"], start)
    finally:
        on_host.unlink()
    reports = [path for path in (ROOT / "reports" / host.name).rglob("*") if path.is_file() and not path.is_symlink()]
    wants("a report", bool(reports), True)
    wants("reports with the key", [str(path) for path in reports if key.encode() in path.read_bytes()], [])


def removed(host: Host) -> None:
    """The last instance goes with all that Octoserve put on the host, but for its models; these where that is asked."""
    ran("playbooks/remove.yml")
    left = host.run(
        f"ls -d {OURS}; getent passwd octoserve; systemctl list-units --no-legend 'octoserve*'", check=False
    )
    wants("left", left.split(), [])
    wants("state", host.run("ls /var/lib/octoserve").split(), ["models"])
    wants("model", host.run(f"ls {MODELS}/fake | grep -c gguf").strip(), "3")
    wants("answer", host.answer(), None)
    ran("playbooks/remove.yml", options=("-e", "octoserve_remove_models=true"))
    wants("models", host.run(f"ls {MODELS}").split(), [])


CASES = [
    Case("status", "says what runs, changes nothing", status, runs=1),
    Case("stop", "stays down, also after a boot", stopped),
    Case("a deploy with a key", "starts it again; the key is in no argument, log or report", keyed, runs=1),
    Case("remove the last instance", "nothing is left but the models, and these go where that is asked", removed),
]
