"""Fetch a source tree once, as one archive with a known SHA-256: from an sdist, a URL or file, or a git repository."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from .digest import sha256_file

KINDS = ("sdist", "archive", "git")
TIMEOUT_S = 1800
SHA256_DIGITS = 64
_BLOCK = 1 << 20


class SourceError(RuntimeError):
    """A source cannot be had, or is not the one that was named; the message says found and wanted."""


@dataclass(frozen=True)
class Origin:
    """Where a source comes from.

    kind sdist: `url` is the project's name in the package index; archive: a URL or a path; git: a repository.
    `version` is the project's version, a label, or a tag or full commit. `sha256` is not asked of git, where the
    commit is the digest.
    """

    kind: str
    url: str
    version: str
    sha256: str = ""

    def path(self, folder: Path) -> Path:
        """The archive's place in a folder; any change of the origin makes another."""
        digest = hashlib.sha256("\n".join([self.kind, self.url, self.version, self.sha256]).encode()).hexdigest()
        return folder / f"source-{digest[:16]}.tar.gz"


def fetch(origin: Origin, archive: Path) -> None:
    """Put the source at `archive`, verified, or raise SourceError and leave nothing."""
    if origin.kind != "git" and len(origin.sha256) != SHA256_DIGITS:
        raise SourceError(f"{origin.url} {origin.version}: a sha256 of 64 digits is wanted, found {origin.sha256!r}")
    archive.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{archive.stem}-", dir=archive.parent))
    try:
        {"sdist": _sdist, "archive": _archive, "git": _git}[origin.kind](origin, work)
        (found,) = work.glob("*.tar.gz")
        digest = sha256_file(found)
        if origin.sha256 and digest != origin.sha256:
            raise SourceError(f"{origin.url} {origin.version}: sha256 is {digest}, wanted {origin.sha256}; not used")
        found.replace(archive)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sdist(origin: Origin, work: Path) -> None:
    # With the hash in a requirements file, pip looks at the bytes before it runs the source's own build backend.
    wanted = work / "requirements.txt"
    wanted.write_text(f"{origin.url}=={origin.version} --hash=sha256:{origin.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", f"--no-binary={origin.url}", f"--dest={work}", f"--requirement={wanted}"]
    _run(command)


def _archive(origin: Origin, work: Path) -> None:
    target = work / "source.tar.gz"
    try:
        if "://" not in origin.url:
            shutil.copyfile(origin.url, target)
            return
        if not origin.url.startswith("https://"):
            raise SourceError(f"{origin.url}: wanted an https:// URL or a path")
        with urllib.request.urlopen(origin.url, timeout=60) as response, target.open("wb") as file:  # noqa: S310  https only
            shutil.copyfileobj(response, file, _BLOCK)
    except (OSError, urllib.error.URLError) as error:
        raise SourceError(f"{origin.url}: {error}") from error


def _git(origin: Origin, work: Path) -> None:
    repository = work / "repository.git"
    _run(["git", "init", "--quiet", "--bare", str(repository)])
    git = ["git", f"--git-dir={repository}"]
    _run([*git, "fetch", "--quiet", "--depth=1", origin.url, origin.version])
    _run([*git, "archive", "--format=tar.gz", "--prefix=source/", f"--output={work / 'source.tar.gz'}", "FETCH_HEAD"])


def _run(command: list[str]) -> None:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}  # nobody would answer git's question for a password
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise SourceError(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise SourceError(f"{' '.join(command[:4])} … ended with {done.returncode}: {' '.join(lines[-5:])}")
