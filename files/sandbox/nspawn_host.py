#!/usr/bin/env python3
"""Make, boot, stop and remove one sandbox host: a Debian tree run by systemd-nspawn with its own systemd.

The host shares the machine's network and listens on a loopback address of its own, so that Ansible reaches it
over ordinary SSH. A process belongs to the host when its root directory is the tree, which needs no bookkeeping
and stays true when a supervisor was killed. Needs root and a Linux machine with systemd-nspawn.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

REBOOT_STATUS = 133  # systemd-nspawn's exit status when the payload asked for a reboot and --keep-unit is set
POWEROFF = signal.SIGRTMIN + 4  # systemd as PID 1 understands it as "start poweroff.target", see systemd(1)
POLL_S = 0.1
# Unmasked, ssh.socket listens on every interface whatever sshd_config says; the others cost time or touch the
# network that the host shares with this machine.
MASKED_UNITS = (
    "ssh.socket",
    "nftables.service",
    "systemd-firstboot.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
)
ADMIN = "admin"
# What lies beside a host's tree, by the end of its name.
PARTIAL, LOCK, CONSOLE = ".partial", ".lock", ".console.log"


class SandboxError(Exception):
    """The sandbox host cannot do what was asked; the message says what was found and what to do."""


def beside(path: Path, end: str) -> Path:
    """A file of a host beside its tree; the tree's name may hold dots of its own."""
    return path.with_name(path.name + end)


def processes_in(tree: Path) -> list[int]:
    """PIDs (of this machine) whose root directory is `tree`."""
    wanted = tree.stat()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            root = (entry / "root").stat()
        except OSError:  # the process ended meanwhile
            continue
        if (root.st_dev, root.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.append(int(entry.name))
    return found


def leader_of(pids: list[int]) -> int | None:
    """The process among `pids` that is PID 1 of the host, or None while it is not there."""
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        namespaces = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
        if len(namespaces) > 1 and namespaces[-1] == "1":
            return pid
    return None


def answers_ssh(address: str, port: int) -> bool:
    """Whether an SSH server greets at the address."""
    try:
        with socket.create_connection((address, port), timeout=1) as connection:
            connection.settimeout(2)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def check_machine() -> None:
    """Say before anything starts why no host can be made here."""
    if platform.system() != "Linux":
        raise SandboxError(f"the sandbox needs Linux, found {platform.system()}: use a Linux machine or a VM")
    if os.geteuid() != 0:
        raise SandboxError("the sandbox needs root to boot a host: run as root, or give this user sudo")
    for program, package in {"systemd-nspawn": "systemd-container", "mmdebstrap": "mmdebstrap"}.items():
        if shutil.which(program) is None:
            raise SandboxError(f"{program} not found: apt-get install {package}")


def check_address(address: str, port: int) -> None:
    """Raise where another program has the address."""
    with socket.socket() as probe:
        # Without it, connections of an earlier boot in TIME_WAIT would look like a taken port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SandboxError(
                    f"{address}:{port} is taken by another program (see: ss -ltnp 'sport = :{port}'): "
                    "stop it, or give the sandbox host another address or port"
                ) from error
            raise SandboxError(f"cannot listen on {address}:{port}: {error.strerror}") from error


def enter_own_cgroup(tree: Path) -> list[Path]:
    """Move this process into a cgroup of its own, so that two hosts never share one; returns the folders."""
    # Another checkout may have a host of the same name.
    name = f"octoserve-{tree.name}-{hashlib.sha256(str(tree).encode()).hexdigest()[:8]}"
    made = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
            mount = next((m for m in mounts if (m / "cgroup.controllers").exists()), None)
        elif controllers == "name=systemd":
            mount = Path("/sys/fs/cgroup/systemd")
        else:
            continue
        if mount is None or not mount.exists():
            continue
        folder = mount / path.lstrip("/") / name
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        made.append(folder)
    return made


def remove_cgroups(folders: list[Path]) -> None:
    """Remove the cgroups of a host that has ended, deepest first."""
    for folder in folders:
        # The supervisor itself leaves first: a cgroup with a process in it cannot be removed.
        (folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        for child, _, _ in os.walk(folder, topdown=False):
            Path(child).rmdir()


def supervise(name: str, tree: Path, binds: list[str], lock_file: Path, console: Path) -> None:
    """Run the host until it powers off, booting it again after each reboot. Runs as a daemon."""
    os.setsid()
    lock = lock_file.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    with Path(os.devnull).open("rb") as null, console.open("ab") as log:
        os.dup2(null.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    command = ["systemd-nspawn", "--quiet", "--directory", str(tree), "--boot", "--machine", name]
    command += ["--register=no", "--keep-unit", "--console=pipe", "--resolv-conf=copy-host", "--timezone=off"]
    command += [f"--bind-ro={bind}" for bind in binds]
    status = REBOOT_STATUS
    while status == REBOOT_STATUS:
        # Each boot gets fresh cgroups: systemd leaves its own hierarchy behind below the last ones.
        cgroups = enter_own_cgroup(tree)
        status = subprocess.run(command, check=False).returncode
        remove_cgroups(cgroups)
    sys.exit(status)


def make_base(args: argparse.Namespace) -> bool:
    """Make the tree that all hosts start from, once, with Debian's own tools. Returns whether it was made."""
    if args.base.exists():
        return False
    args.base.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(args.base, PARTIAL)
    command = [
        "mmdebstrap",
        "--quiet",
        "--format=tar",
        "--variant=minbase",
        f"--include={args.include}",
        args.suite,
    ]
    done = subprocess.run(
        [*command, str(partial)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise SandboxError(f"mmdebstrap ended with {done.returncode}:\n{done.stderr[-2000:]}")
    partial.replace(args.base)
    return True


def make_tree(args: argparse.Namespace) -> bool:
    """Unpack the base for this host and give it an identity. Returns whether anything was made."""
    if args.tree.exists():
        return False
    if not args.base.exists():
        raise SandboxError(f"{args.base} is not there: make_base makes it")
    partial = beside(args.tree, PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    unpack = ["tar", "--extract", "--preserve-permissions", "--xattrs", "--xattrs-include=*"]
    subprocess.run([*unpack, f"--file={args.base}", f"--directory={partial}"], check=True)
    give_identity(partial, args)
    partial.rename(args.tree)
    return True


def give_identity(tree: Path, args: argparse.Namespace) -> None:
    """Name, machine id, SSH server on the host's own address, and an admin who may use sudo."""
    (tree / "etc/hostname").write_text(f"{args.name}\n")
    (tree / "etc/hosts").write_text(f"127.0.0.1 localhost\n{args.address} {args.name}\n")
    # Without an id, systemd's first-boot presets would start ssh.socket.
    (tree / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
    # mmdebstrap leaves the package lists empty but fresh; apt would think them valid.
    os.utime(tree / "var/lib/apt/lists", (0, 0))
    for unit in MASKED_UNITS:
        link = tree / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    (tree / "etc/ssh/sshd_config.d/sandbox.conf").write_text(
        f"ListenAddress {args.address}\nPort {args.port}\nPasswordAuthentication no\nUseDNS no\n"
    )
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    subprocess.run(["ssh-keygen", "-A", "-f", str(tree)], check=True, stdout=subprocess.DEVNULL)
    # The controller's certificate authorities, so that clients in the host trust what this machine trusts.
    shutil.copyfile("/etc/ssl/certs/ca-certificates.crt", tree / "etc/ssl/certs/ca-certificates.crt")
    subprocess.run(["chroot", str(tree), "useradd", "--create-home", "--shell", "/bin/bash", ADMIN], check=True)
    sudoers = tree / "etc/sudoers.d/sandbox"
    sudoers.write_text(f"{ADMIN} ALL=(ALL) NOPASSWD: ALL\n")
    sudoers.chmod(0o440)
    home = tree / "home" / ADMIN
    keys = home / ".ssh/authorized_keys"
    keys.parent.mkdir(mode=0o700)
    shutil.copyfile(args.authorized_key, keys)
    for path in (keys.parent, keys):
        os.chown(path, home.stat().st_uid, home.stat().st_gid)


def remove(args: argparse.Namespace) -> bool:
    """Stop the host and remove all that it left. Returns whether there was anything."""
    stopped = stop(args)
    left = [path for end in ("", PARTIAL, LOCK, CONSOLE) if (path := beside(args.tree, end)).exists()]
    for path in left:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return stopped or bool(left)


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error message."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no output)"


def start(args: argparse.Namespace) -> bool:
    """Boot the host and wait until SSH answers. Returns whether anything was started."""
    if not args.tree.exists():
        raise SandboxError(f"{args.tree} is not there: make_tree makes it")
    if processes_in(args.tree):
        wait_for_ssh(args, None)
        return False
    check_address(args.address, args.port)
    console = beside(args.tree, CONSOLE)
    console.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            supervise(args.name, args.tree, args.bind, beside(args.tree, LOCK), console)
        except BaseException as error:  # a daemon has nobody to raise to: the log is where it speaks
            if not isinstance(error, SystemExit):
                print(f"supervisor: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    wait_for_ssh(args, child)
    return True


def wait_for_ssh(args: argparse.Namespace, supervisor: int | None) -> None:
    """Wait, bounded, until the host greets over SSH; a supervisor that died says why."""
    console = beside(args.tree, CONSOLE)
    deadline = time.monotonic() + args.timeout
    while not answers_ssh(args.address, args.port):
        if supervisor is not None and os.waitpid(supervisor, os.WNOHANG) != (0, 0):
            raise SandboxError(f"the host {args.name} did not boot; its console said:\n{tail(console)}")
        if time.monotonic() > deadline:
            raise SandboxError(
                f"no SSH at {args.address}:{args.port} after {args.timeout:.0f} s; its console said:\n{tail(console)}"
            )
        time.sleep(POLL_S)


def stop(args: argparse.Namespace) -> bool:
    """Power the host off, by force when it does not end in time. Returns whether it was running."""
    if not args.tree.exists():
        return False
    pids = processes_in(args.tree)
    if not pids:
        return False
    leader = leader_of(pids)
    if leader is not None:
        os.kill(leader, POWEROFF)
        if wait_until_empty(args.tree, args.timeout):
            return True
    for _ in range(10):  # killing the leader kills its PID namespace; the rest are processes that entered from outside
        for pid in processes_in(args.tree):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if wait_until_empty(args.tree, 2):
            return True
    raise SandboxError(f"processes of {args.name} survive SIGKILL: {processes_in(args.tree)}; a reboot ends them")


def wait_until_empty(tree: Path, timeout: float) -> bool:
    """Whether the tree's last process and its supervisor ended within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not processes_in(tree) and not is_supervised(tree):
            return True
        time.sleep(POLL_S)
    return False


def is_supervised(tree: Path) -> bool:
    """Whether a supervisor holds the host's lock."""
    lock_file = beside(tree, LOCK)
    if not lock_file.exists():
        return False
    with lock_file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line: ACTION, the host's name, tree and address, and what the action needs."""
    parser = argparse.ArgumentParser(description="Make, boot, stop or remove one sandbox host.")
    parser.add_argument("action", choices=sorted(ACTIONS))
    parser.add_argument("--name", required=True, help="machine name")
    parser.add_argument("--tree", required=True, type=Path, help="folder of the host's Debian tree")
    parser.add_argument("--address", default="127.0.0.2", help="loopback address that its SSH server listens on")
    parser.add_argument("--port", type=int, default=2222, help="port of its SSH server")
    parser.add_argument("--base", type=Path, help="archive that trees are unpacked from (make_base, make_tree)")
    parser.add_argument("--suite", default="bookworm", help="Debian release (make_base)")
    parser.add_argument("--include", default="", help="packages, separated by commas (make_base)")
    parser.add_argument("--authorized-key", type=Path, help="public key that may log in (make_tree)")
    parser.add_argument("--bind", action="append", default=[], help="SOURCE:TARGET mounted read-only (start)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for boot or power-off")
    return parser.parse_args(argv)


ACTIONS = {"make_base": make_base, "make_tree": make_tree, "start": start, "stop": stop, "remove": remove}


def main(argv: list[str]) -> int:
    """Prints one word, changed or unchanged; an error goes to stderr with status 1."""
    args = parse(argv)
    try:
        check_machine()
        print("changed" if ACTIONS[args.action](args) else "unchanged")
    except (SandboxError, OSError, subprocess.CalledProcessError) as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
