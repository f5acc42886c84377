"""GPU facts through NVML, and a bounded wait until every card's memory is free.

Read with NVIDIA's own bindings (nvidia-ml-py, module `pynvml`), no torch and no CUDA context, in a child, because on a
sick driver NVML may never return. All sizes are bytes. Whatever keeps the facts from being read is a `GpuError` that
says what was found, what was wanted and what to do.
"""

from __future__ import annotations

import math
import pwd
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from . import bounded

if TYPE_CHECKING:
    from collections.abc import Iterator

try:
    import pynvml
except ImportError:  # said by session(): the facts below stay importable without it
    pynvml = None

T = TypeVar("T")
GIB = 1024**3

# What is wrong, as GpuError.problem. Callers branch on these, people read the message.
NO_DRIVER = "no_driver"
CANNOT_SEE = "cannot_see"
VERSION_MISMATCH = "version_mismatch"
LOST_CARD = "lost_card"
WRONG_COUNT = "wrong_count"
MEMORY_NOT_FREE = "memory_not_free"
NO_ANSWER = "no_answer"

MAX_COMMAND = 160
#: Seconds for the opening of NVML and for each reading. Without persistence mode the opening wakes each of eight cards.
ANSWER_S = 60.0
POLL_MIN_S = 0.2
POLL_MAX_S = 10.0
REPORT_EVERY_S = 15.0

# A command line goes to journals and reports: the value after an argument of such a name does not.
_SECRET_ARGUMENT = re.compile(r"(-[\w-]*(?:api[-_]?key|hf[-_]?token|password|secret)[= ])\S+", re.IGNORECASE)
_KERNEL_MODULE = re.compile(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.[\d.]+)")


class GpuError(Exception):
    """The GPUs are not as wanted, or cannot be seen.

    `problem` is one of the constants above; the text is one line.
    """

    def __init__(self, problem: str, found: str, wanted: str, action: str) -> None:
        super().__init__(f"Found: {found}. Wanted: {wanted}. Do: {action}.")
        self.problem = problem
        self.found = found
        self.wanted = wanted
        self.action = action

    def __reduce__(self) -> tuple[type[GpuError], tuple[str, str, str, str]]:
        """For pickle, which would call it with the text alone."""
        return type(self), (self.problem, self.found, self.wanted, self.action)


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a card. None where NVML or /proc does not show it."""

    pid: int
    memory_used: int | None
    user: str | None
    command: str | None
    state: str | None
    """State letter of /proc/PID/status; D waits inside the kernel, here mostly in the driver."""


@dataclass(frozen=True)
class PcieLink:
    """Generation and width (lanes) of a card's link. A card at rest may run at a lower generation."""

    generation: int | None
    max_generation: int | None
    width: int | None
    max_width: int | None


@dataclass(frozen=True)
class Card:
    """One GPU as NVML shows it, in NVML's order (PCI bus order)."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    memory_total: int
    memory_free: int
    memory_used: int
    processes: tuple[GpuProcess, ...]
    processes_visible: bool
    """False where an empty list proves nothing: NVML refused it, or a container hides the processes."""
    pcie: PcieLink


@dataclass(frozen=True)
class Gpus:
    """The host's cards and its driver."""

    driver_version: str
    nvml_version: str
    cuda_version: str
    """Newest CUDA version that the driver serves, such as 13.1."""
    container: str | None
    cards: tuple[Card, ...]


def container_kind(root: Path = Path("/")) -> str | None:
    """Name of the container technology that this process runs in, None on a real or virtual machine.

    Reads the marks that systemd, Docker and Podman leave, and the `container` variable of PID 1 (LXC).
    """
    mark = _read_text(root / "run/systemd/container")
    if mark:
        return mark.strip()
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    found = re.search(r"(?:^|\0)container=([^\0]+)", _read_text(root / "proc/1/environ") or "")
    return found.group(1) if found else None


def kernel_module_version(text: str) -> str | None:
    """Driver version out of the text of /proc/driver/nvidia/version."""
    found = _KERNEL_MODULE.search(text)
    return found.group(1) if found else None


def redact(command: str) -> str:
    """The command line on one line, without the values of secret arguments, cut at MAX_COMMAND characters."""
    command = _SECRET_ARGUMENT.sub(r"\1***", " ".join(command.split()))
    return command if len(command) <= MAX_COMMAND else command[: MAX_COMMAND - 1] + "…"


def describe_process(pid: int, memory_used: int | None, proc: Path = Path("/proc")) -> GpuProcess:
    """A process of NVML's list with its user, command and state from /proc, as far as they are visible."""
    status = _read_text(proc / str(pid) / "status") or ""
    uid = re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)
    state = re.search(r"^State:\s+(\S)", status, re.MULTILINE)
    name = re.search(r"^Name:\s+(.+)", status, re.MULTILINE)
    arguments = (_read_text(proc / str(pid) / "cmdline") or "").rstrip("\0").replace("\0", " ").strip()
    # A process that is ending has no arguments any more, only its name.
    command = redact(arguments) if arguments else (f"[{name.group(1)}]" if name else None)
    return GpuProcess(
        pid=pid,
        memory_used=memory_used,
        user=_user_name(int(uid.group(1))) if uid else None,
        command=command,
        state=state.group(1) if state else None,
    )


@contextmanager
def session(timeout_s: float = ANSWER_S) -> Iterator[Callable[[], Gpus]]:
    """Open NVML and yield the function that reads the facts anew at each call.

    Raises GpuError (NO_DRIVER, CANNOT_SEE, VERSION_MISMATCH) where NVML cannot be opened; the yielded
    function raises it for a card that does not answer (LOST_CARD); both where NVML does not return (NO_ANSWER).
    Opening once for many readings matters: without persistence mode each opening wakes every card, which takes seconds.
    """
    with reading(read_gpus, timeout_s) as read:
        yield read


@contextmanager
def reading(read: Callable[[], T], timeout_s: float = ANSWER_S) -> Iterator[Callable[[], T]]:
    """As `session`, for another function that reads through NVML."""

    @contextmanager
    def opened_for_it() -> Iterator[Callable[[], T]]:
        with opened():
            yield read

    try:
        with bounded.session(opened_for_it, timeout_s) as ask:
            yield ask
    except (TimeoutError, EOFError) as error:
        found = f"NVML did not answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else "NVML crashed"
        raise GpuError(
            NO_ANSWER,
            found,
            "an answer of every card's driver",
            "read the kernel's log (`journalctl -k --grep 'NVRM|Xid'`; Xid 119 and 120 are the GSP firmware) and look "
            "for processes in state D (`ps -eo pid,stat,cmd`); then reset the card or reboot: a driver that hangs "
            "does not come back by itself",
        ) from error


@contextmanager
def opened() -> Iterator[None]:
    """Open NVML in this process, with no bound. Raises GpuError as `session`."""
    container = container_kind()
    if pynvml is None:
        raise GpuError(
            NO_DRIVER,
            f"{sys.executable} has no Python package nvidia-ml-py",
            "NVIDIA's NVML bindings",
            "run the play's role `host`, which makes the tools venv, or use that venv's Python",
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _init_failure(error, container) from error
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def required_free(card: Card, utilization: float) -> int:
    """Free bytes that vLLM wants on this card before it starts: total * gpu_memory_utilization, rounded up.

    Source: `request_memory` in vllm/v1/worker/utils.py (0.32.0). vLLM asks CUDA after it has opened its context, we
    ask NVML before: NVML's total is larger by what the driver reserves (615 MiB on an H200), which makes up for the
    context that is still to come (527 MiB there). tests/gpu/test_gpu_memory.py holds this on a real card.
    """
    return math.ceil(card.memory_total * utilization)


def short_cards(gpus: Gpus, utilization: float) -> list[Card]:
    """The cards whose free memory is less than vLLM wants."""
    return [card for card in gpus.cards if card.memory_free < required_free(card, utilization)]


def describe_shortfalls(short: list[Card], utilization: float) -> str:
    """One line: what each of these cards lacks, and who holds its memory."""
    return "; ".join(_shortfall(card, utilization) for card in short)


def check_limits(utilization: float, timeout_s: float) -> None:
    """Raise ValueError unless 0 < utilization <= 1 and the timeout is finite and not negative."""
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization is {utilization}, wanted more than 0 and at most 1 (0.95 is usual)")
    if not 0 <= timeout_s < math.inf:
        raise ValueError(f"timeout is {timeout_s} s, wanted a number of seconds that is 0 or more")


def check_count(gpus: Gpus, expected: int | None) -> None:
    """Raise GpuError (WRONG_COUNT) unless there are exactly `expected` cards; None means at least one."""
    found = len(gpus.cards)
    if found == expected or (expected is None and found > 0):
        return
    if gpus.container:
        action = f"pass every card into this container ({gpus.container}), or correct the expected count"
    else:
        action = (
            "look for a card that left the bus (`lspci -d 10de:`, `journalctl -k --grep 'NVRM|Xid'`), "
            "or correct the expected count"
        )
    raise GpuError(
        WRONG_COUNT, f"{_cards(found)} in NVML", _cards(expected) if expected else "at least one card", action
    )


def wait_until_free(
    read: Callable[[], Gpus],
    utilization: float,
    timeout_s: float,
    *,
    expected_count: int | None = None,
    interval_s: float = 1.0,
    report: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Gpus:
    """Wait until every card has the free memory that vLLM wants, and return the facts of that moment.

    Reads at least once, then every `interval_s` (kept within POLL_MIN_S..POLL_MAX_S) until `timeout_s` has
    passed. `report` gets a line at the first shortfall and then every REPORT_EVERY_S.
    Raises GpuError: MEMORY_NOT_FREE at the end of the time, naming card, shortfall and holders;
    WRONG_COUNT and what `read` raises at once, because waiting mends neither. ValueError: see check_limits.
    """
    check_limits(utilization, timeout_s)
    interval_s = min(max(interval_s, POLL_MIN_S), POLL_MAX_S)
    start = clock()
    next_report = start
    while True:
        gpus = read()
        check_count(gpus, expected_count)
        short = short_cards(gpus, utilization)
        if not short:
            return gpus
        now = clock()
        left = start + timeout_s - now
        if left <= 0:
            raise _not_free(gpus, short, utilization, timeout_s)
        if now >= next_report:
            next_report = now + REPORT_EVERY_S
            report(
                f"{_cards(len(short))} of {len(gpus.cards)} not free yet, waiting up to {left:.0f} s: "
                + describe_shortfalls(short, utilization)
            )
        sleep(min(interval_s, left))


def read_gpus() -> Gpus:
    """The facts, in a process that has NVML open. Raises GpuError."""
    container = container_kind()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = pynvml.nvmlSystemGetDriverVersion()
        library = pynvml.nvmlSystemGetNVMLVersion()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise _init_failure(error, container) from error
    return Gpus(
        driver_version=driver,
        nvml_version=library,
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
        container=container,
        cards=tuple(_read_card(index, container) for index in range(count)),
    )


def _read_card(index: int, container: str | None) -> Card:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        listed = offered(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
        processes = tuple(describe_process(item.pid, item.usedGpuMemory) for item in listed or ())
        return Card(
            index=index,
            uuid=pynvml.nvmlDeviceGetUUID(handle),
            name=pynvml.nvmlDeviceGetName(handle),
            pci_bus_id=pynvml.nvmlDeviceGetPciInfo(handle).busId,
            memory_total=memory.total,
            memory_free=memory.free,
            memory_used=memory.used,
            processes=processes,
            processes_visible=listed is not None and (bool(processes) or container is None),
            pcie=PcieLink(
                generation=offered(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
                max_generation=offered(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
                width=offered(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
                max_width=offered(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            ),
        )
    except pynvml.NVMLError as error:
        raise _card_failure(index, error) from error


def offered(getter: Callable[[Any], Any], handle: Any) -> Any:
    """What the getter says, None where this card, driver or user is not offered it."""
    try:
        return getter(handle)
    except pynvml.NVMLError as error:
        if error.value in {
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_NO_PERMISSION,
        }:
            return None
        raise


def _init_failure(error: Any, container: str | None) -> GpuError:
    """Why NVML cannot be opened, from its return code."""
    code = error.value
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        module = kernel_module_version(_read_text(Path("/proc/driver/nvidia/version")) or "")
        return GpuError(
            VERSION_MISMATCH,
            f"the loaded kernel module ({module or 'version not visible'}) and libnvidia-ml.so.1 "
            f"({_library_version() or 'version not visible'}) come from different drivers",
            "one driver version in the kernel and in the libraries",
            "make the container's libraries those of the host's driver"
            if container
            else "reboot, since a driver upgrade takes effect only then, and hold the driver's packages",
        )
    if container:
        return GpuError(
            CANNOT_SEE,
            f"GPUs cannot be seen from inside this container ({container}): {error} (NVML code {code})",
            "NVML of a loaded NVIDIA driver",
            "pass the cards and the driver's libraries into the container (/dev/nvidia*, libnvidia-ml.so.1), "
            "or run on the host itself",
        )
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        found, action = "no libnvidia-ml.so.1", "install the NVIDIA driver and reboot"
    elif code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        found = "the NVIDIA kernel module is not loaded"
        action = "run `modprobe nvidia`; if it fails, `journalctl -k --grep NVRM` says why"
    elif code == pynvml.NVML_ERROR_NO_PERMISSION:
        found, action = "no permission on /dev/nvidia*", "run as root or give this user the cards' devices"
    else:
        found = f"NVML does not open: {error} (code {code})"
        action = "look into `journalctl -k --grep 'NVRM|Xid'`"
    return GpuError(NO_DRIVER, found, "NVML of a loaded NVIDIA driver", action)


def _card_failure(index: int, error: Any) -> GpuError:
    return GpuError(
        LOST_CARD,
        f"card {index} does not answer: {error} (NVML code {error.value})",
        "every card that the driver counts to answer",
        "read the Xid in `journalctl -k --grep Xid`, then reboot the host, or cut its power if the card "
        "stays away; starting again before that cannot work",
    )


def _not_free(gpus: Gpus, short: list[Card], utilization: float, timeout_s: float) -> GpuError:
    processes = [process for card in short for process in card.processes]
    actions = []
    if any(process.state == "D" for process in processes):
        actions.append("reboot if a process in state D stays: it is stuck in the driver and no signal ends it")
    if processes:
        actions.append("end the named processes (`systemctl status PID` shows the unit)")
    if any(not card.processes and card.processes_visible for card in short):
        actions.append(
            "where no process is named, look for one in state D (`ps -eo pid,stat,cmd`): if memory stays "
            "held without a process, only a card reset or a reboot frees it"
        )
    if any(not card.processes_visible for card in short):
        where = f"outside this container ({gpus.container})" if gpus.container else "as root"
        actions.append(f"run `nvidia-smi` {where} to see who holds the memory")
    return GpuError(
        MEMORY_NOT_FREE,
        f"after {timeout_s:g} s " + describe_shortfalls(short, utilization),
        f"free memory of at least {utilization:g} of the total on every card, or vLLM refuses to start",
        "; ".join(actions),
    )


def _shortfall(card: Card, utilization: float) -> str:
    wanted = required_free(card, utilization)
    return (
        f"card {card.index} ({card.pci_bus_id}) has {card.memory_free / GIB:.2f} GiB free of "
        f"{card.memory_total / GIB:.2f}, {(wanted - card.memory_free) / GIB:.2f} GiB less than wanted, "
        f"held by {_holders(card)}"
    )


def _holders(card: Card) -> str:
    if card.processes:
        return ", ".join(_holder(process) for process in card.processes)
    return "no process that NVML names" if card.processes_visible else "processes that NVML cannot see from here"


def _holder(process: GpuProcess) -> str:
    size = "unknown size" if process.memory_used is None else f"{process.memory_used / GIB:.2f} GiB"
    state = ", state D" if process.state == "D" else ""
    user = process.user or "not visible"
    return f"PID {process.pid} (user {user}, {size}{state}: {process.command or 'command not visible'})"


def _cards(count: int) -> str:
    return "1 card" if count == 1 else f"{count} cards"


def _library_version() -> str | None:
    """Driver version that libnvidia-ml.so.1 belongs to; NVML says CUDA.DRIVER, even on a mismatch."""
    try:
        version: str = pynvml.nvmlSystemGetNVMLVersion()
    except pynvml.NVMLError:
        return None
    return version.partition(".")[2]


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read_text(path: Path) -> str | None:
    """The file's text; None where it is not there, not ours to read, or its process has just ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
