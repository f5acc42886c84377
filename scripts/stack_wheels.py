"""The released Python files of the distributions that a stack's series patches, by its lock.

A CUDA wheel is 320 MB, its Python files packed are 12. pip fetches the wheel and checks it against the lock's hashes;
what is kept is a wheel of the same name that holds nothing else, in a folder named by the lock's entries.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from octoserve import patches, stack, wheelhouse

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache/wheels"
_KEPT = re.compile(r".*\.py|[^/]*\.dist-info/.*")


def entries(lock: str, names: Iterable[str]) -> list[str]:
    """The requirements of a lock, hashes included, that are for some distributions (names as PEP 503 compares)."""
    wanted = set(names)
    # A requirement goes on over lines that end with a backslash.
    found = [line for line in lock.replace("\\\n", " ").splitlines() if line and line[0] not in " #-"]
    return [line for line in found if patches.normalize(re.split(r"[=\s\[]", line, maxsplit=1)[0]) in wanted]


def fetch(variant: stack.Variant, names: Iterable[str], cache: Path = CACHE) -> list[Path]:
    """Wheels of some of a variant's distributions, only Python files and metadata in them. Raises WheelhouseError."""
    asked = sorted(names)
    requirements = entries(variant.lock.read_text(encoding="utf-8"), asked)
    if not requirements:
        raise wheelhouse.WheelhouseError(f"{variant.lock} locks none of {', '.join(asked)}")
    text = "\n".join(requirements) + "\n"
    folder = cache / hashlib.sha256(f"{variant.python}\n{text}".encode()).hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            whole, slim = Path(made) / "whole", Path(made) / "slim"
            whole.mkdir()
            slim.mkdir()
            lock = Path(made) / variant.lock.name
            lock.write_text(text, encoding="utf-8")
            wheelhouse.download(lock, whole, wheelhouse.Target(variant.python), variant.extra_index_urls)
            for wheel in whole.iterdir():
                _copy_python_files(wheel, slim / wheel.name)
            slim.rename(folder)
    return sorted(folder.iterdir())


def unpack(wheels: Iterable[Path], folder: Path) -> None:
    """Lay the wheels' Python files and metadata into a folder as an installer would."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, _kept(archive))


def plan(series: patches.Series, wheels: Iterable[Path]) -> patches.Plan:
    """What the whole series changes in the wheels as released. Raises PatchError where it does not apply."""
    touched = set(series.paths())
    with tempfile.TemporaryDirectory() as folder:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in _kept(archive) if name in touched or "dist-info" in name])
        patches.check_versions(series, Path(folder))
        return patches.plan(series, Path(folder))


def _copy_python_files(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as slim:
        for name in _kept(whole):
            slim.writestr(name, whole.read(name))


def _kept(archive: zipfile.ZipFile) -> list[str]:
    return [name for name in archive.namelist() if _KEPT.fullmatch(name)]
