"""The job that merges splits with llama-gguf-split and compares every tensor with the splits as it is written.

Spec: {tool, splits: [path], made_from: {name: identity}, output, receipt_dir, sha256, sources: fetch.to_spec()};
`output` is a new file, one of ours that is to be replaced, or one made by hand that is to be verified and adopted.
Secrets: {token, environment}, for `sources`, where the headers of splits come from that are not on the host.
Result: {path, size, sha256, adopted}.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from io import FileIO
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from .adopt import adopt
from .digest import BLOCK, Hasher, buffers, read_at, sha256_file
from .fetch import FetchError, check_space, file_size, free_bytes, from_spec
from .gguf import GgufError, read
from .job import Progress, WorkerError, main
from .merge import Layout, Segment, expected_layout, layout
from .receipt import Receipt, receipt_name, sync_folder
from .splits import check_set, read_set

TEMPORARY = ".merging"
_POLL = 0.005
# The tool moves the cursor back to show how far it is.
_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The disk is asked to write behind the merge, so that the last fsync has little left to do.
_FLUSH_EVERY = 256 << 20


def work(spec: dict[str, Any], secrets: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run the job."""
    os.environ.update(secrets.get("environment") or {})
    try:
        return _Merge(spec, secrets.get("token"), progress).run()
    except (GgufError, FetchError, EOFError) as error:
        raise WorkerError(str(error)) from error


class _Merge:
    def __init__(self, spec: dict[str, Any], token: str | None, progress: Progress) -> None:
        self.progress, self.token = progress, token
        self.sources = from_spec(spec.get("sources") or ())
        self.splits = [Path(path) for path in spec["splits"]]
        self.output = Path(spec["output"])
        self.temporary = self.output.with_name(self.output.name + TEMPORARY)
        self.tool, self.made_from, self.sha256 = str(spec["tool"]), dict(spec["made_from"]), spec.get("sha256")
        self.receipt = Receipt(Path(spec["receipt_dir"]))

    def run(self) -> dict[str, Any]:
        name = receipt_name(self.output, self.receipt.folder)
        adopt = self.output.exists() and not self.receipt.valid(name)
        digest = self._adopt() if adopt else self._merge()
        entry = self.receipt.record(name, digest, self.made_from)
        return {"path": str(self.output), "size": entry.size, "sha256": digest, "adopted": adopt}

    def _adopt(self) -> str:
        """Verify a file that somebody else made: by its digest, against the splits, or with their headers."""
        try:
            merged = read(self.output)
            check_set([merged])
            if self.sha256:
                self.progress.phase("hashing what is there", merged.size)
                return self._compare_digest(sha256_file(self.output, self.progress.advance))
            if self.sources and not all(path.exists() for path in self.splits):
                digest, self.made_from = adopt(self.output, self.sources, self.token, self.progress)
                return digest
            parts = read_set(self.splits)
            with self.output.open("rb") as file:
                plan = layout(merged, file.read(merged.data_offset), parts)
            self.progress.phase("comparing what is there with the splits", merged.size)
            return verify(self.output, plan, self.progress.at)
        except (GgufError, WorkerError, EOFError) as error:
            raise WorkerError(
                f"{self.output}: a file is there that was not made from these splits, it was not changed. "
                f"Move it away or choose another output. ({error})"
            ) from error

    def _merge(self) -> str:
        self.progress.phase("reading the splits' headers")
        plan = expected_layout(read_set(self.splits))
        self.temporary.unlink(missing_ok=True)
        check_space(self.output.parent, plan.size)
        self.progress.phase("merging and verifying", plan.size)
        try:
            digest = self._run_tool(plan)
            self.progress.phase("waiting for the disk")
            with self.temporary.open("rb") as file:
                os.fsync(file.fileno())
            self.temporary.chmod(0o644)
            self.temporary.replace(self.output)
        finally:
            self.temporary.unlink(missing_ok=True)
        sync_folder(self.output.parent)
        return digest

    def _run_tool(self, plan: Layout) -> str:
        """Merge, following what the tool writes; return the digest of the verified file."""
        command = [self.tool, "--merge", str(self.splits[0]), str(self.temporary)]
        with tempfile.TemporaryFile() as log:
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            except OSError as error:
                raise WorkerError(f"{self.tool}: cannot be run: {error.strerror}; build it first") from error
            try:
                follower = _Follower(process, self.temporary, self.tool, log)
                follower.wait_for(1)
                digest = verify(self.temporary, plan, self.progress.at, follower.wait_for)
                follower.finish(plan.size)
            finally:
                process.kill()
                process.wait()
        if _start(self.temporary, len(plan.header)) != plan.header:
            digest = self._verify_with_own_header()
        return self._compare_digest(digest)

    def _verify_with_own_header(self) -> str:
        """A tool of another version may order metadata differently: compare with the header that it wrote."""
        merged = read(self.temporary)
        plan = layout(merged, _start(self.temporary, merged.data_offset), read_set(self.splits))
        self.progress.phase("verifying", plan.size)
        return verify(self.temporary, plan, self.progress.at)

    def _compare_digest(self, digest: str) -> str:
        if self.sha256 and digest != self.sha256:
            raise WorkerError(f"the merged file's sha256 is {digest}, wanted {self.sha256}")
        return digest


class _Follower:
    """Knows how far the tool has written, and why it stopped."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path, tool: str, log: Any) -> None:
        self.process, self.path, self.tool, self.log = process, path, tool, log
        self.size = -1

    def wait_for(self, end: int) -> None:
        """Return once the file reaches to `end`; raise where the tool ended before."""
        while self.size < end:
            ended = self.process.poll()  # before the size, which is final once the tool has ended
            self.size = file_size(self.path)
            if self.size >= end:
                return
            if ended is not None:
                raise WorkerError(self._stopped(ended, self.size, end))
            time.sleep(_POLL)

    def finish(self, size: int) -> None:
        """Wait for the tool's end; nothing may be missing or too much."""
        code = self.process.wait()
        found = self.path.stat().st_size
        if code or found != size:
            raise WorkerError(self._stopped(code, found, size))

    def _stopped(self, code: int, found: int, wanted: int) -> str:
        self.log.seek(0)
        words = _TERMINAL.sub("", self.log.read().decode(errors="replace")).strip().splitlines()[-3:]
        folder = self.path.parent
        return (
            f"{self.path}: {self.tool} ended with {code} after {max(0, found)} bytes, wanted {wanted}; "
            f"is the disk full? {folder} has {free_bytes(folder) / 1e9:.2f} GB free. "
            f"It said: {' | '.join(words) or 'nothing'}"
        )


def verify(merged: Path, plan: Layout, at: Callable[[int], None], wait_for: Callable[[int], None] | None = None) -> str:
    """Compare every tensor with its split, byte by byte; return the SHA-256 of header, tensors and padding.

    The header is taken from the plan: whoever calls compares it with the file's own. `wait_for(end)` is
    called before bytes up to `end` are read. Raises WorkerError that names the first tensor that differs.
    """
    with merged.open("rb", buffering=0) as file, Hasher() as hasher, _Flusher(file.fileno()) as flusher:

        def verified(end: int) -> None:
            at(end)
            flusher.at(end)

        comparison = _Comparison(file, hasher, wait_for or (lambda end: None), verified)
        hasher.update(plan.header)
        done = len(plan.header)
        for source, segments in groupby(plan.segments, key=lambda segment: segment.source):
            with source.open("rb", buffering=0) as split:
                for segment in segments:
                    comparison.padding(done, segment.offset)
                    comparison.tensor(segment, split)
                    done = segment.offset + segment.nbytes
        comparison.padding(done, plan.size)
        return hasher.hexdigest()


class _Comparison:
    """Reads the merged file and the splits in blocks, compares them and hands the former on to be hashed."""

    def __init__(
        self, merged: FileIO, hasher: Hasher, ready: Callable[[int], None], verified: Callable[[int], None]
    ) -> None:
        self.merged, self.hasher, self.ready, self.verified = merged, hasher, ready, verified
        self.ring = buffers()
        self.other = bytearray(BLOCK)

    def tensor(self, segment: Segment, split: FileIO) -> None:
        """Compare one tensor."""
        for start in range(0, segment.nbytes, BLOCK):
            count = min(BLOCK, segment.nbytes - start)
            end = segment.offset + start + count
            buffer = next(self.ring)
            self.ready(end)
            read_at(self.merged, buffer, segment.offset + start, count)
            read_at(split, self.other, segment.source_offset + start, count)
            if buffer != self.other if count == BLOCK else buffer[:count] != self.other[:count]:
                raise WorkerError(
                    f"{self.merged.name!s}: tensor {segment.name} differs from {segment.source.name} within bytes "
                    f"{start} to {start + count}; the merge is not usable, run it again (and suspect the disk)"
                )
            self.hasher.update(memoryview(buffer)[:count])
            self.verified(end)
        # The page cache is for the merged file; the splits are not read again.
        os.posix_fadvise(split.fileno(), 0, segment.source_offset + segment.nbytes, os.POSIX_FADV_DONTNEED)

    def padding(self, start: int, end: int) -> None:
        """Between tensors lie zeros."""
        if start == end:
            return
        self.ready(end)
        found = bytearray(end - start)
        read_at(self.merged, found, start, len(found))
        if any(found):
            raise WorkerError(f"{self.merged.name!s}: bytes {start} to {end} are not zero; the merge is not usable")
        self.hasher.update(found)


class _Flusher:
    """Starts writing to disk in a thread each time another stretch has been verified."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._next = _FLUSH_EVERY
        self._due = threading.Event()
        self._end = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Flusher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end = True
        self._due.set()
        self._thread.join()

    def at(self, end: int) -> None:
        """Take note of how far the file has been verified."""
        if end >= self._next:
            self._next = end + _FLUSH_EVERY
            self._due.set()

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._end:
                return
            os.fdatasync(self._descriptor)


def _start(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


if __name__ == "__main__":
    sys.exit(main(work))
