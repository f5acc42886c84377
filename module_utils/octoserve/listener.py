"""Who listens where: whether a service could take its address, and who has it if not."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Union

_Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp, see Linux' include/net/tcp_states.h


@dataclass(frozen=True)
class Holder:
    """A process that listens on a port."""

    pid: int
    command: str


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now. Raises OSError where the address is not this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        # Connections of an earlier server in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def holders(address: str, port: int, proc: Path = Path("/proc")) -> list[Holder]:
    """Processes that keep a server from this address, as far as this caller can see them.

    A name in place of an address matches every listener on the port.
    """
    wanted = None
    with contextlib.suppress(ValueError):
        wanted = ipaddress.ip_address(address)
    inodes = _listening_inodes(wanted, port, proc)
    found = []
    for entry in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            if _links(entry / "fd") & inodes:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(Holder(int(entry.name), command))
    return found


def is_of_unit(pid: int, unit: str, proc: Path = Path("/proc")) -> bool:
    """Whether a process runs in the cgroup of a systemd unit."""
    return any(unit in parts for parts in groups(pid, proc))


def groups(pid: int, proc: Path = Path("/proc")) -> list[list[str]]:
    """The parts of a process's path in each cgroup hierarchy; none where it has ended."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    return [line.split(":", 2)[2].split("/") for line in lines]


def are_of_unit(found: list[Holder], unit: str) -> bool:
    """Whether an address that is not free is the unit's own: somebody has it, and nobody else."""
    return bool(found and unit) and all(is_of_unit(holder.pid, unit) for holder in found)


def _links(folder: Path) -> set[str]:
    """Where a process's open files point; one that is closed meanwhile does not hide the others."""
    found = set()
    for link in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(link.readlink()))
    return found


def _listening_inodes(wanted: _Address | None, port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        path = proc / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            (address, _, number), state, inode = fields[1].partition(":"), fields[3], fields[9]
            if state == _LISTEN and int(number, 16) == port and _overlap(wanted, _address(address)):
                inodes.add(f"socket:[{inode}]")
    return inodes


def _address(text: str) -> _Address:
    """An address as /proc/net/tcp writes it: each 32-bit word in the machine's (little) byte order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return getattr(found, "ipv4_mapped", None) or found


def _overlap(wanted: _Address | None, found: _Address) -> bool:
    return wanted is None or wanted == found or wanted.is_unspecified or found.is_unspecified


def taken(address: str, port: int, found: list[Holder]) -> str:
    """Who has an address, in a line."""
    by = "; ".join(f"PID {holder.pid} ({holder.command[:120]})" for holder in found)
    who = f"held by {by}" if by else "held by a process that is not visible from here (another container or namespace)"
    return f"{address}:{port} is taken, {who}"


def describe(address: str, port: int, found: list[Holder]) -> str:
    """One line for an operator whose service cannot have its address."""
    return f"{taken(address, port, found)}: stop it, or choose another port"
