"""Findings about the host around the cards: locked memory, shared memory, page cache, clock and address."""

from __future__ import annotations

import ctypes
import os
import re

from . import listener
from .finding import CANNOT_SEE, ERROR, GIB, OK, WARNING, Finding, Host, read

MIB = 1024**2
# A container's default, 64 MiB, ends in a bus error. NVIDIA's NCCL documentation asks for 1 GiB.
SHM_LEAST = 256 * MIB
SHM_WANTED = GIB
SHARED_MEMORY = "shared memory"
CLOCK_WARNING_S = 60.0  # more than a slow connection needs to bring the controller's time here
CLOCK_ERROR_S = 3600.0  # certificates and signed downloads are refused
CAP_SYS_RESOURCE = 1 << 24  # linux/capability.h: the right to raise limits
_STA_UNSYNC = 0x40  # linux/timex.h
_TIMEX_BYTES = 512  # struct timex has 208; the kernel fills no more
_TIMEX_STATUS = 5 * ctypes.sizeof(ctypes.c_long)  # behind modes (padded to a long), offset, freq, maxerror, esterror


def memlock(host: Host) -> Finding:
    """Whether systemd may give the unit the locked memory that it asks for: it lowers the limit without a word."""
    name, wanted = "locked memory", "unlimited for the service (LimitMEMLOCK)"
    limits = read(host.root / "proc/1/limits")
    found = re.search(r"^Max locked memory\s+\S+\s+(\S+)", limits or "", re.MULTILINE)
    if not found:
        return Finding(name, CANNOT_SEE, "no /proc/1/limits", wanted, "`ulimit -H -l` in a shell of root")
    if found.group(1) == "unlimited":
        return Finding(name, OK, "unlimited for PID 1", wanted)
    status = read(host.root / "proc/1/status") or ""
    rights = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    may_raise = bool(rights and int(rights.group(1), 16) & CAP_SYS_RESOURCE)
    # In a user namespace the right counts for nothing: setrlimit asks for it outside.
    users = (read(host.root / "proc/1/uid_map") or "").split()
    if may_raise and users[:2] in ([], ["0", "0"]):
        return Finding(name, OK, f"{_bytes(found.group(1))} for PID 1, which may raise it", wanted)
    mend = (
        "raise the limit where this host is started, in LXC `lxc.prlimit.memlock: unlimited`, "
        "in Docker `--ulimit memlock=-1`"
    )
    return Finding(name, WARNING, f"capped at {_bytes(found.group(1))}", wanted, mend)


def shared_memory(host: Host) -> Finding:
    """Room in /dev/shm, through which the processes of vLLM and NCCL talk."""
    try:
        found = os.statvfs(host.root / "dev/shm")
    except OSError as error:
        mend = "mount a tmpfs there: `mount -t tmpfs tmpfs /dev/shm`"
        return Finding(SHARED_MEMORY, ERROR, f"no /dev/shm: {error.strerror}", f"{SHM_WANTED / GIB:g} GiB", mend)
    return judge_shared_memory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def judge_shared_memory(total: int, free: int) -> Finding:
    """The finding for these bytes."""
    measured, wanted = f"{free / GIB:.2f} GiB of {total / GIB:.2f} free in /dev/shm", f"{SHM_WANTED / GIB:g} GiB free"
    if free >= SHM_WANTED:
        return Finding(SHARED_MEMORY, OK, measured, wanted)
    if total >= SHM_WANTED:
        mend = "remove what ended services left there (`ls -l /dev/shm`; `fuser -v` shows what is in use)"
    else:
        mend = "`mount -o remount,size=8G /dev/shm` (lasting: /etc/fstab), in Docker `--shm-size=8g`"
    return Finding(SHARED_MEMORY, ERROR if free < SHM_LEAST else WARNING, measured, wanted, mend)


def page_cache(host: Host, model_bytes: int | None) -> Finding:
    """Whether the page cache can hold the model's file, so that a restart does not read it from the disk again."""
    name = "RAM"
    total = re.search(r"^MemTotal:\s+(\d+) kB", read(host.root / "proc/meminfo") or "", re.MULTILINE)
    wanted = "more than the model's file" + (f", {model_bytes / GIB:.2f} GiB" if model_bytes is not None else "")
    if not total:
        return Finding(name, CANNOT_SEE, "no /proc/meminfo", wanted, "`free -g`")
    found = int(total.group(1)) * 1024
    measured = f"{found / GIB:.2f} GiB"
    # Page cache counts against the limit of the group that reads.
    limit = read(host.root / "sys/fs/cgroup/memory.max")
    if limit and limit.isdigit() and int(limit) < found:
        found = int(limit)
        measured = f"{found / GIB:.2f} GiB (limit of the control group)"
    if model_bytes is None:
        mend = "compare by hand, or put the files' sizes into the profile"
        return Finding(name, CANNOT_SEE, f"{measured}; the model's size is not known yet", wanted, mend)
    if found <= model_bytes:
        mend = "add memory, or bear that each start reads the model from the disk"
        return Finding(name, WARNING, measured, wanted, mend)
    return Finding(name, OK, measured, wanted)


def clock(status: int | None, ahead_s: float | None) -> Finding:
    """The host's clock.

    `status` is the kernel's (adjtimex), None where it does not say. `ahead_s` is the time here less the controller's,
    None where it is not known.
    """
    name, wanted = "clock", "synchronized, and the controller's time"
    off = "" if ahead_s is None else f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the controller"
    if ahead_s is not None and abs(ahead_s) > CLOCK_WARNING_S:
        verdict = ERROR if abs(ahead_s) > CLOCK_ERROR_S else WARNING
        mend = "find out which of the two is wrong (`timedatectl` on both) and let it synchronize"
        return Finding(name, verdict, off, wanted, mend)
    if status is None:
        return Finding(name, CANNOT_SEE, off or "the kernel does not say", wanted, "`timedatectl`")
    if status & _STA_UNSYNC:
        mend = "`timedatectl set-ntp true`, or install chrony"
        return Finding(name, WARNING, "not synchronized, says the kernel", wanted, mend)
    return Finding(name, OK, "synchronized", wanted)


def clock_status() -> int | None:
    """The status bits of the kernel's clock (adjtimex(2), which changes nothing where no mode is set)."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
            return None
    except (AttributeError, OSError):
        return None
    return ctypes.c_int.from_buffer(buffer, _TIMEX_STATUS).value


def address(host_address: str, port: int, unit: str, gives_way: str) -> Finding:
    """Whether the service can listen where it is to; one that runs under the unit has its address by right.

    ``gives_way``: a unit that is stopped before the service starts.
    """
    name, wanted = "address", f"{host_address}:{port} for {unit}"
    try:
        if listener.is_free(host_address, port):
            return Finding(name, OK, f"{host_address}:{port} is free", wanted)
        found = listener.holders(host_address, port)
    except OSError as error:
        measured = f"this host cannot listen on {host_address}: {error.strerror}"
        return Finding(name, ERROR, measured, "one of the host's own addresses", "correct octoserve_host")
    if listener.are_of_unit(found, unit):
        return Finding(name, OK, f"{host_address}:{port} is the running service's", wanted)
    if listener.are_of_unit(found, gives_way):
        return Finding(name, OK, f"{host_address}:{port} is held by {gives_way}, which gives way", wanted)
    measured = listener.taken(host_address, port, found)
    return Finding(name, ERROR, measured, wanted, "stop it, or choose another octoserve_port")


def _bytes(text: str) -> str:
    return f"{int(text) / MIB:.1f} MiB" if text.isdigit() else text
