"""The job that fills a folder with verified files; see fetch.py for what it is to do with which file.

Spec: {folder, files: fetch.to_spec(), link, merge_later: [name], backoff}. Secrets: {token, environment}.
Result: {files: [{name, size, sha256}], fetched, adopted, bytes_fetched}.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .digest import BLOCK, Hasher, sha256_file
from .fetch import BAD, PART, FetchError, Wanted, check_space, file_size, from_spec, plan, room_for_merge, verified
from .job import Progress, WorkerError, main
from .receipt import Receipt, sync_folder

if TYPE_CHECKING:
    from .download import Hub

FICLONE = 0x40049409  # linux/fs.h
_LFS = b"version https://git-lfs.github.com/spec/"


def work(spec: dict[str, Any], secrets: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run the job."""
    os.environ.update(secrets.get("environment") or {})
    fetch = _Fetch(spec, progress)
    try:
        return fetch.run(from_spec(spec["files"]), secrets.get("token"))
    except FetchError as error:
        raise WorkerError(str(error)) from error
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES}:
            raise
        raise WorkerError(f"{error.filename or spec['folder']}: {error.strerror}; what has arrived is kept") from error


class _Fetch:
    def __init__(self, spec: dict[str, Any], progress: Progress) -> None:
        self.folder, self.progress = Path(spec["folder"]), progress
        self.link, self.backoff = bool(spec.get("link")), float(spec.get("backoff", 1.0))
        self.merge_later = frozenset(spec.get("merge_later") or ())
        self.folder.mkdir(parents=True, exist_ok=True)
        self.receipt = Receipt(self.folder)
        self.total = self.done = 0

    def run(self, wanted: tuple[Wanted, ...], token: str | None) -> dict[str, Any]:
        now = plan(self.folder, wanted)
        hub = self._hub(token, now.missing + now.unverified)
        unverified = tuple(self._resolve(hub, item) for item in now.unverified)
        adopted, foreign = self._adopt(unverified)
        missing = tuple(self._resolve(hub, item) for item in now.missing) + foreign
        kept = tuple(item for item in missing if self._take_kept(item))
        missing = tuple(item for item in missing if item not in kept)
        self._check_space(missing, (*now.present, *adopted, *kept))
        self.total = sum(item.size or 0 for item in missing)
        for item in missing:
            if item.local:
                self._copy(item)
            else:
                assert hub is not None
                self._download(hub, item)
        for path in plan(self.folder, wanted).leftovers:
            path.unlink()
            self.receipt.forget(str(path.relative_to(self.folder)))
        return {
            "files": verified(self.receipt, wanted),
            "fetched": [item.name for item in missing],
            "adopted": [item.name for item in (*adopted, *kept)],
            "bytes_fetched": self.done,
        }

    def _hub(self, token: str | None, items: tuple[Wanted, ...]) -> Hub | None:
        """A folder on the host needs no HTTP, and so no requests."""
        if all(item.local for item in items):
            return None
        from .download import Hub

        return Hub(token, self.backoff)

    def _resolve(self, hub: Hub | None, item: Wanted) -> Wanted:
        """Complete size and digest from where the file comes from; what is known must agree."""
        if item.local:
            return self._resolve_local(item)
        from .download import Interrupted

        assert hub is not None
        self.progress.phase(f"asking for {item.name}")
        with contextlib.suppress(Interrupted):  # the download itself tries again
            record = hub.record(item.source)
            _compare(item, record.size, record.sha256)
            return Wanted(
                item.name,
                item.source,
                False,
                record.size if item.size is None else item.size,
                item.sha256 or record.sha256,
            )
        return item

    @staticmethod
    def _resolve_local(item: Wanted) -> Wanted:
        size = file_size(Path(item.source))
        if size < 0:
            raise WorkerError(f"{item.source}: there is no such file on the host")
        with Path(item.source).open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise WorkerError(f"{item.source}: is a Git LFS pointer, not the file; run 'git lfs pull' there")
        _compare(item, size, None)
        return Wanted(item.name, item.source, True, size, item.sha256)

    def _adopt(self, items: tuple[Wanted, ...]) -> tuple[list[Wanted], tuple[Wanted, ...]]:
        """Verify in place what is there without a receipt; return what was good and what is to be fetched."""
        good, foreign = [], []
        known = [item for item in items if item.sha256]
        if known:
            self.progress.phase("verifying what is there", sum(item.size or 0 for item in known))
        for item in items:
            path = self.folder / item.name
            if not item.sha256 or item.size not in (None, file_size(path)):
                foreign.append(item)
                continue
            digest = sha256_file(path, self.progress.advance)
            if digest == item.sha256:
                self.receipt.record(item.name, digest)
                good.append(item)
            else:
                self._aside(path, item, digest)
                foreign.append(item)
        return good, tuple(foreign)

    def _take_kept(self, item: Wanted) -> bool:
        """Use a file that was put aside for a digest which is the wanted one by now."""
        name = item.name + BAD
        entry = self.receipt.valid(name)
        if not entry or not item.sha256 or not item.agrees(entry.size, entry.sha256):
            return False
        self._place(self.folder / name, item, entry.sha256)
        self.receipt.forget(name)
        return True

    def _check_space(self, items: tuple[Wanted, ...], there: tuple[Wanted, ...]) -> None:
        needed = room_for_merge(self.folder, (*items, *there), self.merge_later)
        for item in items:
            if not (item.local and self.link):
                needed += max(0, (item.size or 0) - max(0, file_size(self._part(item))))
        check_space(self.folder, needed)

    def _download(self, hub: Hub, item: Wanted) -> None:
        from .download import Part, Transfer

        path = self._part(item)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._continue_short_file(item)
        before = self.done
        while True:
            self.progress.phase(f"reading what has arrived of {item.name}", max(0, file_size(path)))
            with Part(path, item.size, self.progress.at) as part:
                resumed = part.resumed
                self.progress.phase("fetching", self.total, done=before + part.size)
                Transfer(hub, item.source, part, item.size, lambda size: self.progress.at(before + size)).run()
                digest = part.finish()
            if not item.sha256 or digest == item.sha256:
                break
            if not resumed:
                raise self._wrong(path, item, digest)
            # What an earlier run left may be of another revision: once more, all of it.
            path.unlink()
        self._place(path, item, digest)
        self.done = before + (item.size or file_size(self.folder / item.name))

    def _continue_short_file(self, item: Wanted) -> None:
        """Take an unverified file that is too short as the beginning: somebody's broken download."""
        path, part = self.folder / item.name, self._part(item)
        if item.size is None or self.receipt.valid(item.name) or part.exists():
            return
        if 0 <= file_size(path) < item.size:
            path.replace(part)

    def _copy(self, item: Wanted) -> None:
        source, path = Path(item.source), self._part(item)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.progress.phase("copying", self.total, done=self.done)
        digest = self._link(source, path) or self._clone(source, path) or self._copy_bytes(source, path)
        if item.sha256 and digest != item.sha256:
            path.unlink()
            raise WorkerError(f"{source}: sha256 is {digest}, wanted {item.sha256}; {item.name} was not changed")
        self._place(path, item, digest)
        self.done += item.size or 0

    def _link(self, source: Path, path: Path) -> str | None:
        """Share the source's bytes where that was asked for and one file system holds both."""
        if not self.link:
            return None
        try:
            os.link(source, path)
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.EPERM, errno.EMLINK}:
                raise
            return None
        return sha256_file(path, self.progress.advance)

    def _clone(self, source: Path, path: Path) -> str | None:
        """Let the file system share the blocks until one of the two is changed (reflink)."""
        with source.open("rb") as original, path.open("wb") as copy:
            try:
                fcntl.ioctl(copy.fileno(), FICLONE, original.fileno())
            except OSError:
                return None
        return sha256_file(path, self.progress.advance)

    def _copy_bytes(self, source: Path, path: Path) -> str:
        with source.open("rb", buffering=0) as original, path.open("wb") as copy, Hasher() as hasher:
            while block := original.read(BLOCK):
                hasher.update(block)
                copy.write(block)
                self.progress.advance(len(block))
            copy.flush()
            os.fsync(copy.fileno())
            return hasher.hexdigest()

    def _place(self, path: Path, item: Wanted, digest: str) -> None:
        """Put a verified file under its name, for everyone to read, and write its receipt."""
        final = self.folder / item.name
        if path.stat().st_nlink == 1:  # a link shares its mode with the source
            path.chmod(0o644)
        path.replace(final)
        sync_folder(final.parent)
        self.receipt.record(item.name, digest)

    def _wrong(self, path: Path, item: Wanted, digest: str) -> WorkerError:
        kept = self._aside(path, item, digest)
        return WorkerError(
            f"{item.source}: sha256 is {digest}, wanted {item.sha256}. It is kept as {kept}: if the profile is wrong, "
            "correct its sha256 and the kept file is used; if not, run again to fetch it once more"
        )

    def _aside(self, path: Path, item: Wanted, digest: str) -> Path:
        kept = self.folder / (item.name + BAD)
        path.replace(kept)
        if path == self.folder / item.name:
            self.receipt.forget(item.name)
        self.receipt.record(item.name + BAD, digest)
        return kept

    def _part(self, item: Wanted) -> Path:
        return self.folder / (item.name + PART)


def _compare(item: Wanted, size: int | None, sha256: str | None) -> None:
    """Raise where the source says beforehand that its file is another one."""
    if None not in (size, item.size) and size != item.size:
        raise WorkerError(f"{item.source}: has {size} bytes, wanted {item.size}; another revision?")
    if sha256 and item.sha256 and sha256 != item.sha256:
        raise WorkerError(
            f"{item.source}: the hub says its sha256 is {sha256}, wanted {item.sha256}; "
            "another revision, or a wrong digest in the profile? Nothing was fetched"
        )


if __name__ == "__main__":
    sys.exit(main(work))
