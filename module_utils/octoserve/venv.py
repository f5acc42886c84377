"""Virtual environments made from a lock and a wheelhouse: whole or not at all, with a stamp of what they hold."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STAMP = "octoserve-lock.sha256"
#: An index is reached with the authorities that the host trusts: a company's proxy is not in pip's or uv's own list.
SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
#: uv installs wheels far faster than pip; without it (the tools venv, which brings uv) pip serves.
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")


class VenvError(RuntimeError):
    """A virtual environment cannot be made; the message holds the installer's last words."""


@dataclass(frozen=True)
class Source:
    """Where packages come from: a lock and a wheelhouse archive, or (archive None) the host's package index."""

    lock: Path
    archive: Path | None = None
    extra_index_urls: tuple[str, ...] = ()


def digest(lock: Path) -> str:
    """SHA-256 of a lock file, hexadecimal."""
    return hashlib.sha256(lock.read_bytes()).hexdigest()


def is_installed(path: Path, lock_digest: str) -> bool:
    """Whether the folder is a complete environment of that lock."""
    stamp = path / STAMP
    # The interpreter is a link that an upgrade of the distribution can leave dangling.
    return (path / "bin/python").exists() and stamp.exists() and stamp.read_text().strip() == lock_digest


def make(path: Path, python: str, source: Source, uv: str | None = None) -> None:
    """Make the environment beside `path`, then put it in its place. Raises VenvError."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    create(partial, python, source, uv)
    if not uv:
        _rename_in_scripts(partial, path.name)
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def create(path: Path, python: str, source: Source, uv: str | None = None) -> None:
    """Make an environment at an empty place; its stamp is written last."""
    if uv:  # relocatable: the environment is renamed into its place later
        _run([uv, "venv", "--quiet", "--relocatable", "--no-python-downloads", f"--python={python}", str(path)])
    else:
        _run([python, "-m", "venv", str(path)])
    interpreter = str(path / "bin/python")
    with _unpacked(source.archive, path) as wheels:
        where = ["--no-index", f"--find-links={wheels}"] if wheels else []
        where += [f"--extra-index-url={url}" for url in source.extra_index_urls if not wheels]
        what = ["--no-deps", "--require-hashes", f"--requirement={source.lock}"]
        if uv:
            # The cache lies on the environment's own file system, so that files are linked, not copied.
            cache = path / ".uv-cache"
            uv_command = [uv, "pip", "install", "--quiet", f"--python={interpreter}", f"--cache-dir={cache}"]
            # PyTorch's index has other versions of much else; the hashes say which file is meant, wherever it lies.
            uv_command += ["--index-strategy=unsafe-best-match"]
            _run([*uv_command, *(["--offline"] if wheels else []), *where, *what])
            shutil.rmtree(cache)
        else:
            _run([interpreter, *PIP, *where, *what])
    (path / STAMP).write_text(digest(source.lock) + "\n")


def _rename_in_scripts(path: Path, name: str) -> None:
    """Give the environment's later name to its scripts, which find their interpreter by its whole path."""
    for script in (path / "bin").iterdir():
        content = script.read_bytes()
        if os.fsencode(path.name) in content and not script.is_symlink():
            script.write_bytes(content.replace(os.fsencode(path.name), os.fsencode(name)))


@contextlib.contextmanager
def _unpacked(archive: Path | None, path: Path) -> Iterator[Path | None]:
    """The wheels of an archive in a folder that is gone afterwards; None without an archive."""
    if archive is None:
        yield None
        return
    wheels = path / ".wheels"
    wheels.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if not member.isfile() or Path(member.name).name != member.name:
                    raise VenvError(f"{archive} holds {member.name!r}: not a wheelhouse; gather it again")
                tar.extract(member, wheels)
        yield wheels
    except tarfile.TarError as error:
        raise VenvError(
            f"{archive} is damaged ({error}); remove it on the controller and here, and run again"
        ) from error
    finally:
        shutil.rmtree(wheels, ignore_errors=True)


def _run(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "UV_SYSTEM_CERTS": "1"}
    if SYSTEM_CERTIFICATES.exists():
        environment.setdefault("PIP_CERT", str(SYSTEM_CERTIFICATES))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-2000:]
        raise VenvError(f"{' '.join(command[:4])} … ended with {done.returncode}: {words}")
