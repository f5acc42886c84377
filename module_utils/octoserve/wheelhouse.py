"""Gather on one machine, from a lock with hashes, all that another installs without a package index.

A lock is a pip requirements file in which every requirement is pinned and carries SHA-256 hashes
(https://pip.pypa.io/en/stable/topics/secure-installs/). A wheelhouse is one uncompressed tar of the wheels,
named by what went in, so that a finished one is never made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: glibc of Debian 12 and of every supported Ubuntu is at least 2.35; pip wants each older platform named too.
NEWEST_GLIBC_MINOR = 35
OLDEST_GLIBC_MINOR = 5
MACHINES = ("x86_64", "aarch64")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")


class WheelhouseError(RuntimeError):
    """A lock is not one, or a wheel cannot be had; the message says which and what to do."""


@dataclass(frozen=True)
class Target:
    """The Python that will install: `python` is like "3.11", `machine` like "x86_64"."""

    python: str
    machine: str = "x86_64"

    def pip_options(self) -> list[str]:
        """Options that make pip on this machine choose wheels for the target."""
        short = "cp" + self.python.replace(".", "")
        platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in _glibc_minors()]
        platforms += [f"manylinux2014_{self.machine}", f"linux_{self.machine}"]
        options = [f"--python-version={self.python}", "--implementation=cp"]
        options += [f"--abi={abi}" for abi in (short, "abi3", "none")]
        return options + [f"--platform={platform}" for platform in platforms]


def _glibc_minors() -> list[int]:
    return list(range(NEWEST_GLIBC_MINOR, OLDEST_GLIBC_MINOR - 1, -1))


def pinned(lock: str) -> list[str]:
    """Return the requirements of a lock as "name==version", in order.

    Raises WheelhouseError for a lock that pins nothing, or holds a requirement without a pin or a hash.
    """
    found = []
    for line in lock.replace("\\\n", " ").splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _PIN.match(text)
        if match is None or not _HASH.search(text):
            raise WheelhouseError(
                f"not a locked requirement: {text[:80]!r}; wanted name==version with --hash=sha256:… (make lock)"
            )
        found.append(f"{match['name']}=={match['version']}")
    if not found:
        raise WheelhouseError("the lock holds no requirement; wanted name==version lines (make lock)")
    return found


def archive_path(folder: Path, name: str, lock: bytes, target: Target) -> Path:
    """Where the wheelhouse of this lock and target lies: <folder>/<name>-<digest>.tar."""
    digest = hashlib.sha256(lock + f"\n{target.python} {target.machine}\n".encode()).hexdigest()
    return folder / f"{name}-{digest[:16]}.tar"


def gather(lock_file: Path, archive: Path, target: Target, extra_index_urls: Sequence[str] = ()) -> int:
    """Download every wheel of the lock and pack them as `archive`. Returns the number of wheels.

    The configured index is asked first, `extra_index_urls` only when it does not have everything. pip checks
    each file against the lock's hashes.
    """
    wanted = pinned(lock_file.read_text())
    archive.parent.mkdir(parents=True, exist_ok=True)
    with _alone(archive.parent):
        if archive.exists():  # another run on this machine was first
            return len(wanted)
        return _gather(lock_file, archive, target, extra_index_urls, wanted)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One run at a time gathers: deploys of several hosts share a controller, and each clears away what others left."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _gather(
    lock_file: Path, archive: Path, target: Target, extra_index_urls: Sequence[str], wanted: Sequence[str]
) -> int:
    for left in archive.parent.glob(f".{archive.stem}-*"):  # by a controller that was killed
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    wheels = Path(tempfile.mkdtemp(prefix=f".{archive.stem}-", dir=archive.parent))
    partial = wheels.with_name(f"{wheels.name}.tar.partial")
    try:
        download(lock_file, wheels, target, extra_index_urls)
        found = sorted(wheels.iterdir())
        # Markers of the lock may rule some requirements out for this target, never more than all of them.
        if not found:
            raise WheelhouseError(
                f"pip found none of the {len(wanted)} requirements of {lock_file} fit for Python {target.python} "
                f"on {target.machine}"
            )
        with tarfile.open(partial, "w") as tar:
            for wheel in found:
                tar.add(wheel, arcname=wheel.name, filter=_anonymous)
        partial.replace(archive)
        return len(found)
    finally:
        shutil.rmtree(wheels, ignore_errors=True)
        partial.unlink(missing_ok=True)


def download(lock_file: Path, wheels: Path, target: Target, extra_index_urls: Sequence[str] = ()) -> None:
    """Fetch every wheel of a lock into a folder; pip checks each against the lock's hashes. Raises WheelhouseError."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--require-hashes", "--only-binary=:all:", f"--dest={wheels}"]
    command += [*target.pip_options(), f"--requirement={lock_file}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and extra_index_urls:
        command += [f"--extra-index-url={url}" for url in extra_index_urls]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WheelhouseError(f"pip could not gather {lock_file}: {_errors(done.stderr)}")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who packed it and when, so that equal wheels make equal archives."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = "root"
    member.mode = 0o644
    return member


def _errors(stderr: str) -> str:
    """pip's words from its first error on: a wrong hash is told in the lines below it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if line.startswith("ERROR")), -3)
    return " ".join(lines[first:])[-2000:]
