"""Faults that a service meets. Each is injected for real; it must answer again, or say clearly why it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.faults.host import UNIT, FaultError, Host, journal_says

#: Which file of the release the fake stack patches.
PATCHED = "$(echo /opt/octoserve/releases/fake-1-*/lib/python3*/site-packages)/vllm/__init__.py"
MODEL = "/var/lib/octoserve/models/fake/tiny-glm-00002-of-00003.gguf"
WATCHDOG = "/run/octoserve-main-watchdog/memory.json"
AGAIN = "answers again by itself"


@dataclass(frozen=True)
class Fault:
    """``inject`` returns when the fault is there; ``judge`` waits for how it must end.

    ``bound_s``: seconds from fault to end that it may take: what the unit's pauses and limits, the watchdog's looks and
    the load of the engine allow together in these scenarios, and a few times that, since the machine may do other work.
    ``ends``: in words. ``engine``: which one can meet it, `fake`, `real` or `any`.
    """

    name: str
    ends: str
    bound_s: float
    inject: Callable[[Host], object]
    judge: Callable[[Host, float, str], None]
    engine: str = "fake"
    mend: Callable[[Host], object] = lambda _host: None


FAULTS: list[Fault] = []


def again(host: Host, bound_s: float, _since: str) -> None:
    """It answers, and from a start after the fault."""
    host.until(
        "it answers from another start",
        bound_s,
        lambda: host.unit()["InvocationID"] not in ("", host.before) and host.answer() is not None,
    )


def same_start(host: Host, bound_s: float, _since: str) -> None:
    """It answers, and was not restarted."""
    host.until("it answers", bound_s, lambda: host.answer() is not None)
    if host.unit()["InvocationID"] != host.before:
        raise FaultError(f"it was restarted: {host.unit()}")


def stays_down(*words: str) -> Callable[[Host, float, str], None]:
    """It is down and stays so, and its journal names why."""

    def judge(host: Host, bound_s: float, since: str) -> None:
        host.until("it has given up", bound_s, lambda: host.unit()["ActiveState"] in ("failed", "inactive"))
        time.sleep(3)  # longer than the pause between two starts
        if host.unit()["ActiveState"] not in ("failed", "inactive") or host.processes():
            raise FaultError(f"it did not stay down: {host.unit()} {host.processes()}")
        journal_says(host, since, *words)

    return judge


def killed(*names: str) -> Callable[[Host], None]:
    """SIGKILL to processes whose names begin so."""
    return lambda host: host.kill("KILL", *names)


def restarted(host: Host) -> None:
    """Start it anew, as a crash or an operator would; what follows is what the fault is about."""
    host.run(f"systemctl restart --no-block {UNIT}")


def shell(script: str) -> Callable[[Host], object]:
    """Do this on the host, then restart the service."""

    def inject(host: Host) -> None:
        host.run(script)
        restarted(host)

    return inject


def undo(script: str) -> Callable[[Host], object]:
    """Do this on the host afterwards."""
    return lambda host: host.run(script)


def cards(*lines: str) -> Callable[[Host], object]:
    """Change the stub's cards, then restart the service."""

    def inject(host: Host) -> None:
        host.cards(*lines)
        restarted(host)

    return inject


def crash(host: Host) -> None:
    """SIGKILL of the server while it serves, and the answer of the start after it."""
    before = host.unit()["InvocationID"]
    killed("server")(host)
    host.until(
        "it answers after a crash",
        40,
        lambda: host.unit()["InvocationID"] not in ("", before) and host.answer() is not None,
    )


def settled(host: Host) -> bool:
    """Whether the watchdog counts the start that runs as a good one."""
    memory = json.loads(host.run(f"cat {WATCHDOG}"))
    return bool(memory["settled"]) and memory["invocation"] == host.unit()["InvocationID"]


def crash_now_and_then(host: Host) -> None:
    """Four crashes, more than the starts that may fail in a row, each of a start that had served for a while."""
    for _ in range(4):
        host.until("the watchdog counts this start as a good one", 60, lambda: settled(host))
        crash(host)


def crash_at_every_answer(host: Host) -> None:
    """Each start answers once and crashes; systemd has counted nothing before."""
    host.run(f"systemctl reset-failed {UNIT}")
    for _ in range(3):
        crash(host)
    killed("server")(host)


FAULTS += [
    Fault("SIGKILL of the server", AGAIN, 120, killed("server"), again, "any"),
    Fault("SIGKILL of the engine core", AGAIN, 120, killed("VLLM::EngineCor"), again, "any"),
    Fault("SIGKILL of a worker", AGAIN, 120, killed("VLLM::Worker"), again, "any"),
    Fault("SIGKILL of every process at once", AGAIN, 60, killed(""), again),
    Fault("four crashes of a service that serves for a while between them", AGAIN, 90, crash_now_and_then, again),
    Fault("a crash after each first answer", "gives up after three starts", 30, crash_at_every_answer, stays_down()),
]


def ignore_sigterm_and_restart(host: Host) -> None:
    """A stop that hangs: only SIGKILL ends what ignores SIGTERM. The control file counts at a start."""
    host.control(ignores_sigterm=1)
    host.run(f"systemctl restart {UNIT}")
    host.until("it serves", 30, lambda: host.answer() is not None)
    host.control()
    host.before = host.unit()["InvocationID"]
    restarted(host)


FAULTS.append(Fault("a stop that hangs", AGAIN, 30, ignore_sigterm_and_restart, again))


def watchdog_says(host: Host, since: str, card: int) -> None:
    """The watchdog stopped it for good, and says which card."""
    told = host.run(f"journalctl -u octoserve-main-watchdog --output=cat --no-pager --since='{since}'")
    if "halt: " not in told or f"card {card}" not in told:
        raise FaultError(f"the watchdog does not name the card: {told}")


def lost_at_a_start(host: Host, bound_s: float, since: str) -> None:
    """Three guards refuse, unless the watchdog, which looks every two seconds, is between them."""
    stays_down()(host, bound_s, since)
    try:
        journal_says(host, since, "card 5 does not answer")
    except FaultError:
        watchdog_says(host, since, 5)


def memory_comes_back_late(host: Host) -> None:
    """Each card frees its memory within six seconds after the crash."""
    host.cards("free_mib * 3348 96000 6")
    killed("server")(host)


def memory_stays_held(host: Host) -> None:
    """A process of somebody else keeps a card's memory."""
    pid = host.run("sh -c 'setsid sleep 600 > /dev/null 2>&1 & echo $!'").strip()
    host.cards("free_mib 3 3348", f"process 3 {pid} 94000")
    restarted(host)


FAULTS += [
    Fault("GPU memory that is freed late", AGAIN, 40, memory_comes_back_late, again),
    Fault(
        "GPU memory that somebody keeps",
        "gives up after three starts, names card, PID and user",
        60,
        memory_stays_held,
        stays_down("card 3", "3.27 GiB", "user root", "sleep 600"),
        mend=undo("pkill -f '[s]leep 600'"),
    ),
    Fault(
        "a lost card at a start",
        "stays down; the guard or the watchdog names the card",
        30,
        cards("result 5 15"),
        lost_at_a_start,
    ),
    Fault("a missing card", "gives up after three starts, says so", 30, cards("cards 7"), stays_down("7 cards")),
    Fault(
        "a driver that was upgraded under the library",
        "gives up after three starts, says so",
        30,
        cards("init_result 18"),
        stays_down("come from different drivers"),
    ),
]


def stale_shared_memory(host: Host) -> None:
    """Files that a killed run left; one that a process maps, and one of somebody else."""
    host.run(
        "cd /dev/shm && su -s /bin/sh octoserve -c 'head -c 99999 /dev/zero | tee psm_stale nccl-stale psm_mapped' >&2"
        " && echo theirs > psm_foreign && touch -d '1 hour ago' psm_stale nccl-stale psm_mapped psm_foreign"
        " && (setsid tail -f psm_mapped > /dev/null 2>&1 &)"
    )
    restarted(host)


def only_stale_is_gone(host: Host, bound_s: float, since: str) -> None:
    """Of the four, the two that nobody uses are gone."""
    again(host, bound_s, since)
    found = set(host.run("ls /dev/shm").split())
    if not {"psm_mapped", "psm_foreign"} <= found or {"psm_stale", "nccl-stale"} & found:
        raise FaultError(f"/dev/shm holds {sorted(found)}")


def die_at_every_start(host: Host) -> None:
    """As with a release that does not fit the driver."""
    host.control(dies="out of luck")
    restarted(host)


FAULTS += [
    Fault(
        "stale, mapped and foreign files in /dev/shm",
        "answers; only the stale ones are gone",
        30,
        stale_shared_memory,
        only_stale_is_gone,
        mend=undo("pkill -f '[t]ail -f psm_mapped'; rm -f /dev/shm/psm_mapped /dev/shm/psm_foreign"),
    ),
    Fault(
        "an edited file of the release",
        "gives up, names the file",
        30,
        shell(f"cp {PATCHED} /root/kept && echo '# edited' >> {PATCHED}"),
        stays_down("vllm/__init__.py"),
        mend=undo(f"mv /root/kept {PATCHED}"),
    ),
    Fault(
        "a truncated file of the model",
        "gives up, names the file",
        30,
        shell(f"cp -p {MODEL} /root/kept && truncate -s -1 {MODEL}"),
        stays_down(MODEL, "changed since it was verified"),
        mend=undo(
            f"truncate -s +1 {MODEL} && cp -p /root/kept {MODEL} && touch -r /root/kept {MODEL} && rm /root/kept"
        ),
    ),
    Fault(
        "a missing file of the model",
        "gives up, names the file",
        30,
        shell(f"mv {MODEL} {MODEL}.away"),
        stays_down(MODEL, "is not there"),
        mend=undo(f"mv {MODEL}.away {MODEL}"),
    ),
    Fault(
        "the port taken for two seconds",
        AGAIN,
        30,
        lambda host: host.run(
            f"systemctl stop {UNIT}; (setsid timeout 2 python3 -m http.server 8000 --bind {host.address} "
            f"> /dev/null 2>&1 &) ; sleep 0.5; systemctl start --no-block {UNIT}"
        ),
        again,
    ),
    Fault(
        "an engine that dies at every start",
        "gives up after three starts, names the cause",
        30,
        die_at_every_start,
        stays_down("RuntimeError: out of luck"),
    ),
]


def hang(host: Host) -> None:
    """No request is answered any more, the counters stand still, /health says 200."""
    host.control(hangs=1)
    host.until("the watchdog restarts it", 40, lambda: host.unit()["InvocationID"] not in ("", host.before))
    host.control()


def freeze(host: Host) -> None:
    """The engine core of a real vLLM stands still, as in a driver call that does not return; its server goes on."""
    host.kill("STOP", "VLLM::EngineCor")
    host.until("the watchdog restarts it", 150, lambda: host.unit()["InvocationID"] not in ("", host.before))


def prefill(host: Host) -> None:
    """No request is answered for fifteen seconds, several probes long, but the counters move."""
    host.control(prefills=1)
    time.sleep(15)
    seen = host.run(f"cat {WATCHDOG}")
    host.control()
    if '"busy"' not in seen:
        raise FaultError(f"wanted the watchdog to see it busy, found {seen}")


def hang_with_a_lost_card(host: Host) -> None:
    """A card falls off the bus while it serves, and the engine hangs."""
    host.control(hangs=1)
    host.cards("result 2 15")


def cut_power(host: Host) -> None:
    """Every process of the host ends at once; then somebody switches it on."""
    host.cut_power()
    host.sandbox("start")


def stopped_for_good(host: Host, bound_s: float, since: str) -> None:
    """The watchdog stopped it, and says which card."""
    stays_down()(host, bound_s, since)
    watchdog_says(host, since, 2)


FAULTS += [
    Fault("an engine that hangs behind a healthy /health", "restarted by the watchdog, " + AGAIN, 30, hang, again),
    Fault("SIGSTOP of the engine core", "restarted by the watchdog, " + AGAIN, 120, freeze, again, "real"),
    Fault("a prefill longer than several probes", "left alone by the watchdog", 30, prefill, same_start),
    Fault(
        "a card lost while it serves",
        "stopped for good by the watchdog, which names the card",
        30,
        hang_with_a_lost_card,
        stopped_for_good,
    ),
    Fault(
        "a power cut while it serves",
        "boots, " + AGAIN,
        120,
        cut_power,
        again,
        "any",
    ),
    Fault("a reboot", "boots, " + AGAIN, 60, lambda host: host.run("systemctl reboot", check=False), again),
]


@contextmanager
def left_as_it_was(host: Host) -> Iterator[None]:
    """Whatever happened, the same deployment is current and nothing is left behind."""
    before = host.state()
    yield
    if host.state() != before:
        raise FaultError(f"deployments were {before}, are {host.state()}")
    if left := host.left_behind():
        raise FaultError(f"left behind: {left}")


def meet(host: Host, fault: Fault) -> float:
    """Inject a fault, wait for its end, mend what a person would, and return the seconds from fault to end."""
    with left_as_it_was(host):
        since, host.before = host.now(), host.unit()["InvocationID"]
        began = time.monotonic()
        fault.inject(host)
        fault.judge(host, fault.bound_s, since)
        seconds = time.monotonic() - began
        fault.mend(host)
        host.fresh()
    return seconds
