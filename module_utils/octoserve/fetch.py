"""What a folder of model files needs: present, to be verified, to be fetched; and whether it will fit.

A file is wanted by name, size and SHA-256. Where the profile does not know the last two, the first fetch takes
them from the hub's record (or, where the hub has none, from what it got) and the receipt pins them for this host.
A file is *present* where its receipt is valid for that digest, *unverified* where a file of that size is there
without a receipt (put there by hand), else *missing*.
Downloads grow in `<name>.part`, which a later run resumes. What turned out to have another digest is kept as
`<name>.bad` until a good file is in its place: if the digest in the profile was wrong and is corrected, the
kept file is taken and nothing is downloaded again. A file that is valid for another digest (another
revision) stays in place until the new one is verified.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from .receipt import Receipt

PART, BAD = ".part", ".bad"
# File systems need a little for themselves, and the receipt must always find room.
RESERVE = 64 << 20
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_ENVIRONMENT = (*_PROXIES, *map(str.upper, _PROXIES), "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class FetchError(ValueError):
    """The list of sources is not usable, or the folder has no room."""


@dataclass(frozen=True)
class Wanted:
    """One file: `name` below the folder, where it comes from, bytes, hex digest (None: not known yet).

    `source` is an http(s) URL, or a path on the host where `local` is set.
    """

    name: str
    source: str
    local: bool
    size: int | None
    sha256: str | None

    def agrees(self, size: int, sha256: str) -> bool:
        """Say whether a file of this size and digest is the one that is wanted."""
        return self.size in (None, size) and self.sha256 in (None, sha256)


@dataclass(frozen=True)
class Plan:
    """How a folder stands to what is wanted.

    `leftovers` are parts and bad files of nothing that is wanted; `bytes_to_fetch` leaves out what can be resumed
    and the files whose size is not known yet, `unknown` of them.
    """

    present: tuple[Wanted, ...]
    unverified: tuple[Wanted, ...]
    missing: tuple[Wanted, ...]
    leftovers: tuple[Path, ...]
    bytes_to_fetch: int
    unknown: int

    @property
    def complete(self) -> bool:
        """Whether nothing is to be verified or fetched."""
        return not self.unverified and not self.missing


def wanted_files(sources: Sequence[Mapping[str, Any]]) -> tuple[Wanted, ...]:
    """Resolve `[{url, files: [{path, size, sha256, name?}]}]`; raise FetchError that names what is wrong."""
    found: dict[str, Wanted] = {}
    for source in sources:
        url = str(source["url"])
        for entry in source["files"]:
            path = str(entry["path"])
            name = str(entry.get("name") or PurePosixPath(path).name)
            digest = str(entry["sha256"]).lower() if entry.get("sha256") else None
            if digest and not _SHA256.match(digest):
                raise FetchError(f"{name}: sha256 is {digest!r}, wanted 64 hexadecimal digits")
            size = None if entry.get("size") is None else int(entry["size"])
            for value in (path, name):
                if not value or value.startswith("/") or ".." in PurePosixPath(value).parts:
                    raise FetchError(f"{value!r}: wanted a relative path without '..'")
            if name.endswith((PART, BAD)):
                raise FetchError(f"{name}: names that end in {PART} or {BAD} are used for unfinished files")
            if name in found:
                raise FetchError(f"{name}: wanted twice ({found[name].source} and {url}); give one another 'name'")
            location, local = _locate(url, path)
            found[name] = Wanted(name, location, local, size, digest)
    return tuple(found.values())


def _locate(url: str, path: str) -> tuple[str, bool]:
    parts = urlsplit(url)
    if parts.scheme in {"http", "https"}:
        return f"{url.rstrip('/')}/{quote(path)}", False
    if parts.scheme == "file":
        return str(Path(unquote(parts.path)) / path), True
    if url.startswith("/"):
        return str(Path(url) / path), True
    raise FetchError(f"{url!r}: wanted https://host/org/repo/resolve/revision, file:///folder or /folder")


def plan(folder: Path, wanted: Iterable[Wanted]) -> Plan:
    """Look at the folder and at its receipts; nothing is hashed."""
    receipt = Receipt(folder)
    present, unverified, missing, to_fetch, unknown = [], [], [], 0, 0
    wanted = tuple(wanted)
    for item in wanted:
        entry, size = receipt.valid(item.name), file_size(folder / item.name)
        if entry and item.agrees(entry.size, entry.sha256):
            present.append(item)
            continue
        if not entry and size >= 0 and item.size in (None, size):
            unverified.append(item)
            continue
        missing.append(item)
        kept = receipt.valid(item.name + BAD)
        if item.size is None:
            unknown += 1
        elif not (kept and item.agrees(kept.size, kept.sha256)):
            short = size if not entry and size < item.size else 0
            to_fetch += max(0, item.size - max(short, file_size(folder / (item.name + PART)), 0))
    names = {folder / (item.name + suffix) for item in (*unverified, *missing) for suffix in (PART, BAD)}
    leftovers = tuple(
        path
        for item in sorted({(folder / item.name).parent for item in wanted})
        for suffix in (PART, BAD)
        for path in sorted(item.glob(f"*{suffix}"))
        if path not in names and path.is_file()
    )
    return Plan(tuple(present), tuple(unverified), tuple(missing), leftovers, to_fetch, unknown)


def check_space(folder: Path, needed: int, free: int | None = None) -> None:
    """Raise FetchError where the file system of the folder (or its nearest parent) has not the bytes needed."""
    if not needed:
        return
    free = free_bytes(folder) if free is None else free
    if needed + RESERVE > free:
        raise FetchError(
            f"{folder}: {free / 1e9:.2f} GB free, wanted {(needed + RESERVE) / 1e9:.2f} GB; "
            "free space or choose another folder (and merging takes the size of the model once more)"
        )


def room_for_merge(folder: Path, wanted: Iterable[Wanted], names: Collection[str]) -> int:
    """Return the bytes of the named files, as far as they are known, which a merge beside them takes once more."""
    return sum(max(0, item.size or file_size(folder / item.name)) for item in wanted if item.name in names)


def free_bytes(folder: Path) -> int:
    """Return the bytes that root may still write where the folder is, or will be."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize


def verified(receipt: Receipt, wanted: Iterable[Wanted]) -> list[dict[str, Any]]:
    """Return name, size and digest of each wanted file whose receipt is valid."""
    found = [(item.name, receipt.valid(item.name)) for item in wanted]
    return [{"name": name, "size": entry.size, "sha256": entry.sha256} for name, entry in found if entry]


def environment(proxy: str | None) -> dict[str, str]:
    """Return proxies and certificate files for a worker, which does not inherit the task's environment."""
    found = {name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    if proxy:
        found.update(http_proxy=proxy, https_proxy=proxy)
    return found


def to_spec(wanted: Iterable[Wanted]) -> list[dict[str, Any]]:
    """Return JSON values for the worker; `from_spec` is the way back."""
    return [asdict(item) for item in wanted]


def from_spec(spec: Iterable[dict[str, Any]]) -> tuple[Wanted, ...]:
    """Return what `to_spec` was given."""
    return tuple(Wanted(**item) for item in spec)


def file_size(path: Path) -> int:
    """Return the size of a file, -1 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
