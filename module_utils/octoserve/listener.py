"""Who listens where: whether a service could take its address, and who has it if not."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from pathlib import Path

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


def holders(port: int, proc: Path = Path("/proc")) -> list[Holder]:
    """Processes that listen on the port, as far as this caller can see them."""
    inodes = _listening_inodes(port, proc)
    found = []
    for entry in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            links = {str(link.readlink()) for link in (entry / "fd").iterdir()}
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if links & inodes:
            found.append(Holder(int(entry.name), command))
    return found


def _listening_inodes(port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        path = proc / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{inode}]")
    return inodes


def describe(address: str, port: int, found: list[Holder]) -> str:
    """One line for an operator whose service cannot have its address."""
    by = "; ".join(f"PID {holder.pid} ({holder.command[:120]})" for holder in found)
    who = f"held by {by}" if by else "held by a process that is not visible from here (another container or namespace)"
    return f"{address}:{port} is taken, {who}: stop it, or choose another port"
