"""A patch series on installed distributions: read, applied all or nothing, verified by hash.

``series.yml`` names, for each patch in order, the distribution and version it is for and the SHA-256 of every
file before and after. Each file is so at a known point of the series or has been edited by somebody else. A
file that a killed run left behind is at its first or its last point, because files are replaced whole: the next
run carries on from there.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from . import atomic, unified_diff

PROOFS = ("cpu", "cuda")
#: DEP-3 (Patch Tagging Guidelines), and beyond it what a patch is for and where it is proven.
REQUIRED_HEADERS = ("Description", "Origin", "Last-Update", "Applies-To", "Proof")
_HEADER = re.compile(r"([A-Za-z][A-Za-z-]*): ?(.*)")
_YAML_TO_JSON = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1], encoding='utf-8'))))"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class PatchError(RuntimeError):
    """The series cannot be read, or does not fit what is installed; the message names file and line."""


@dataclass(frozen=True)
class FileHashes:
    """SHA-256 of a file before and after a patch; None where the file is absent."""

    before: str | None
    after: str | None


@dataclass(frozen=True)
class Patch:
    """One patch of a series. ``distributions`` are the names under which the same files are published."""

    file: str
    distributions: tuple[str, ...]
    version: str
    proof: str
    hashes: Mapping[str, FileHashes]
    headers: Mapping[str, str]
    diffs: tuple[unified_diff.FileDiff, ...]


@dataclass(frozen=True)
class Series:
    """Patches in the order in which they apply."""

    patches: tuple[Patch, ...]

    def paths(self) -> list[str]:
        """Every file that the series touches, sorted."""
        return sorted({path for patch in self.patches for path in patch.hashes})

    def distributions(self) -> set[str]:
        """Normalized names of the distributions that the series touches, other builds of them included."""
        return {name for patch in self.patches for name in patch.distributions}


@dataclass
class Plan:
    """What applying a series changes: texts by path, None for a file that is absent."""

    before: dict[str, str | None] = field(default_factory=dict)
    after: dict[str, str | None] = field(default_factory=dict)
    #: For each patch, whether some file of it is still to be changed.
    pending: dict[str, bool] = field(default_factory=dict)

    def changes(self) -> list[str]:
        return sorted(path for path, text in self.after.items() if text != self.before[path])


def sha256(text: str | None) -> str | None:
    """Hexadecimal SHA-256 of a file's text, None for an absent file."""
    return None if text is None else hashlib.sha256(text.encode("utf-8")).hexdigest()


def parse_headers(text: str, name: str) -> dict[str, str]:
    """Read the DEP-3 fields before a diff; continued lines lose their indent, ``.`` is an empty line."""
    headers: dict[str, str] = {}
    key = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() in ("", "---"):
            continue
        if line[0] == " " and key:
            headers[key] += "\n" + ("" if line.strip() == "." else line[1:])
            continue
        found = _HEADER.fullmatch(line)
        if found is None or found[1] in headers:
            raise PatchError(f"{name}:{number}: found {line!r}, wanted a new DEP-3 field 'Name: value'")
        key = found[1]
        headers[key] = found[2]
    missing = [key for key in REQUIRED_HEADERS if not headers.get(key)]
    if not (headers.get("Forwarded") or headers.get("Bug")):
        missing.append("Forwarded or Bug")
    if missing:
        raise PatchError(f"{name}: DEP-3 fields missing: {', '.join(missing)}")
    return headers


def parse_series(document: Any, texts: Mapping[str, str]) -> Series:
    """Build a series from ``series.yml`` as read and the texts of its patches. Raises PatchError."""
    if not isinstance(document, dict) or not isinstance(document.get("patches"), list):
        raise PatchError("series.yml: wanted a mapping with a list 'patches'")
    builds = document.get("builds") or {}
    patches = [_parse_entry(entry, builds, texts) for entry in document["patches"]]
    names = [patch.file for patch in patches]
    if len(set(names)) != len(names):
        raise PatchError(f"series.yml: a patch stands in the list twice: {names}")
    stray = sorted(set(texts) - set(names))
    if stray:
        raise PatchError(f"series.yml does not list {', '.join(stray)}; list or remove them")
    _check_chain(patches)
    return Series(tuple(patches))


def load_series(folder: Path, python: str = sys.executable) -> Series:
    """Read ``series.yml`` and every ``*.patch`` of a stack's folder. Raises PatchError.

    ``python`` is an interpreter with PyYAML. A stack's own has it, a host's need not.
    """
    try:
        document = json.loads(_ask(python, _YAML_TO_JSON, str(folder / "series.yml")))
        texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.patch"))}
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"cannot read the series in {folder}: {error}") from error
    return parse_series(document, texts)


def site_packages_of(python: str) -> Path:
    """Where an interpreter's distributions lie. Raises PatchError."""
    return Path(_ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def check_versions(series: Series, site_packages: Path) -> None:
    """Each patch's distribution must be installed in its very version. Raises PatchError."""
    installed = installed_versions(site_packages)
    for patch in series.patches:
        found = {name: installed[name] for name in patch.distributions if name in installed}
        wanted = f"{' or '.join(patch.distributions)} {patch.version}"
        if not found:
            raise PatchError(f"{patch.file}: found none in {site_packages}, wanted {wanted}; install it first")
        for name, version in found.items():
            # A local part ("+cu129") names a build of the same source.
            if version != patch.version and version.partition("+")[0] != patch.version:
                raise PatchError(
                    f"{patch.file}: found {name} {version} in {site_packages}, wanted {wanted}; "
                    "install that version or carry the series to yours"
                )


def installed_versions(site_packages: Path) -> dict[str, str]:
    """Normalized names and versions of the distributions in a folder, from their ``*.dist-info``."""
    versions = {}
    for info in site_packages.glob("*.dist-info"):
        name, _, version = info.name[: -len(".dist-info")].rpartition("-")
        versions[normalize(name)] = version
    return versions


def normalize(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def plan(series: Series, site_packages: Path) -> Plan:
    """Work out every file's text after the series, from where each file stands now. Raises PatchError."""
    result = Plan(pending={patch.file: False for patch in series.patches})
    for path in series.paths():
        steps = [(patch, diff) for patch in series.patches for diff in patch.diffs if diff.path == path]
        text = result.before[path] = _read(site_packages, path)
        for patch, diff in steps[_position(steps, path, text) :]:
            try:
                text = unified_diff.apply(diff, text)
            except unified_diff.DiffError as error:
                raise PatchError(f"{patch.file} does not fit: {error}") from error
            if sha256(text) != patch.hashes[path].after:
                raise PatchError(
                    f"{patch.file}: {path} comes out as {sha256(text)}, series.yml wants {patch.hashes[path].after}; "
                    "export the series again"
                )
            result.pending[patch.file] = True
        result.after[path] = text
    return result


def write(made: Plan, site_packages: Path) -> None:
    """Carry a plan out: byte-code first, then each file whole. Puts everything back if one cannot be written."""
    changed = made.changes()
    done: list[str] = []
    try:
        for path in changed:
            done.append(path)
            _replace(site_packages / path, made.after[path])
    except OSError as error:
        for path in done:
            _replace(site_packages / path, made.before[path])
        raise PatchError(f"cannot write {error.filename or path}: {error.strerror}; nothing is changed") from error


def verify(hashes: Mapping[str, str | None], site_packages: Path) -> list[str]:
    """Files whose SHA-256 is not the recorded one, each with what was found. Empty where all is well."""
    faults = []
    for path, wanted in sorted(hashes.items()):
        found = sha256(_read(site_packages, path))
        if found != wanted:
            faults.append(f"{path}: found {found or 'no file'}, wanted {wanted or 'no file'}")
    return faults


def final_hashes(series: Series) -> dict[str, str | None]:
    """SHA-256 of every touched file after the whole series."""
    return {path: hashes.after for patch in series.patches for path, hashes in patch.hashes.items()}


def _ask(python: str, code: str, *arguments: str) -> str:
    try:
        done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise PatchError(f"cannot run {python}: {error.strerror}") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PatchError(f"{python} cannot read {' '.join(arguments) or 'its own paths'}: {last[0]}")
    return done.stdout


def _parse_entry(entry: Any, builds: Mapping[str, Any], texts: Mapping[str, str]) -> Patch:
    wanted = {"file": str, "distribution": str, "version": str, "proof": str, "files": dict}
    if not isinstance(entry, dict) or set(entry) != set(wanted):
        raise PatchError(f"series.yml: found {entry!r}, wanted a patch with exactly {', '.join(wanted)}")
    wrong = [key for key, kind in wanted.items() if not isinstance(entry[key], kind)]
    file = str(entry["file"])
    if wrong:
        raise PatchError(f"series.yml: {file}: of the wrong type: {', '.join(wrong)}")
    if entry["proof"] not in PROOFS:
        raise PatchError(f"series.yml: {file}: found proof {entry['proof']!r}, wanted {' or '.join(PROOFS)}")
    if file not in texts:
        raise PatchError(f"series.yml lists {file}, which is not in the folder")
    try:
        head, diffs = unified_diff.parse(texts[file], file)
    except unified_diff.DiffError as error:
        raise PatchError(str(error)) from error
    hashes = {path: _parse_hashes(file, path, value) for path, value in entry["files"].items()}
    paths = [diff.path for diff in diffs]
    if sorted(paths) != sorted(hashes):
        raise PatchError(f"{file} changes {sorted(paths)}, series.yml lists {sorted(hashes)}")
    for path in paths:
        _check_path(file, path)
    headers = parse_headers(head, file)
    distribution, version, proof = (entry[key] for key in ("distribution", "version", "proof"))
    if headers["Applies-To"] != f"{distribution} {version}" or headers["Proof"] != proof:
        raise PatchError(
            f"{file} is for {headers['Applies-To']}, proof {headers['Proof']}; "
            f"series.yml says {distribution} {version}, proof {proof}; export the series again"
        )
    names = tuple(normalize(name) for name in (distribution, *builds.get(distribution, ())))
    return Patch(file, names, version, proof, hashes, headers, tuple(diffs))


def _parse_hashes(file: str, path: str, value: Any) -> FileHashes:
    if isinstance(value, dict) and set(value) == {"before", "after"}:
        before, after = value["before"], value["after"]
        if all(each is None or _SHA256.fullmatch(str(each)) for each in (before, after)) and before != after:
            return FileHashes(before, after)
    raise PatchError(f"series.yml: {file}: {path}: found {value!r}, wanted two different SHA-256: before, after")


def _check_path(file: str, path: str) -> None:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\\" in path:
        raise PatchError(f"{file}: the path {path!r} leads out of site-packages")


def _check_chain(patches: Iterable[Patch]) -> None:
    """Where two patches touch a file, the second must start where the first ends."""
    last: dict[str, tuple[str, str | None]] = {}
    for patch in patches:
        for path, hashes in patch.hashes.items():
            if path in last and last[path][1] != hashes.before:
                raise PatchError(
                    f"series.yml: {path} is {last[path][1]} after {last[path][0]}, "
                    f"but {patch.file} starts from {hashes.before}"
                )
            last[path] = (patch.file, hashes.after)


def _read(site_packages: Path, path: str) -> str | None:
    full = site_packages / path
    if not full.resolve().is_relative_to(site_packages.resolve()):
        raise PatchError(f"{path} leads out of {site_packages} to {full.resolve()}; it is not patched through a link")
    try:
        return full.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"cannot read {full}: {error}") from error


def _position(steps: list[tuple[Patch, unified_diff.FileDiff]], path: str, text: str | None) -> int:
    """How many of the steps the file has behind it. Raises PatchError where it stands at none of these points."""
    found = sha256(text)
    points = [steps[0][0].hashes[path].before, *(patch.hashes[path].after for patch, _ in steps)]
    # The last equal point: a file that comes back to an earlier text has nothing left to do there.
    for position in reversed(range(len(points))):
        if points[position] == found:
            return position
    first, last = steps[0][1], unified_diff.reverse(steps[-1][1])
    raise PatchError(
        f"{path} was edited by somebody else: found SHA-256 {found}, wanted {points[0]} (as released; "
        f"{_misfit(first, text)}) or {points[-1]} (patched; {_misfit(last, text)}). "
        "Install the distribution again, then apply the series"
    )


def _misfit(diff: unified_diff.FileDiff, text: str | None) -> str:
    try:
        unified_diff.apply(diff, text)
    except unified_diff.DiffError as error:
        return str(error)
    return "the lines around the patch are right, the edit lies elsewhere"


def _replace(path: Path, text: str | None) -> None:
    # What a killed run left (names as tempfile makes them), and the byte-code of the text that goes.
    for stale in (f".{path.name}.{'?' * 8}", f"__pycache__/{path.stem}.*.pyc"):
        for leftover in path.parent.glob(stale):
            leftover.unlink(missing_ok=True)
    if text is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    atomic.write_text(path, text, mode)
