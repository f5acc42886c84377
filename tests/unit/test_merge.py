"""Merging: what the tool must have written, and every way in which it can fail to."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_gguf_split
import pytest
from gguf_writer import Data, f32, gguf, split_set, tiny_metadata, tiny_parts, tiny_set, u32
from hub_server import Server
from octoserve import fetch, job, merge_worker
from octoserve.gguf import GgufError, read
from octoserve.job import Progress, WorkerError
from octoserve.merge import expected_layout, identities, is_current
from octoserve.receipt import Entry, Receipt
from octoserve.splits import check_set, read_set

LIBRARY = Path(job.__file__).parents[1]


class Merger:
    """A folder of splits and the worker, run in this process with the stand-in for the tool."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = root / "model"
        self.splits = tiny_set(self.folder)
        self.output = self.folder / "tiny.gguf"
        self.tool = root / "llama-gguf-split"
        self.tool.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_gguf_split.__file__} "$@"\n')
        self.tool.chmod(0o755)
        self.environment = monkeypatch
        self.state = root / "state.json"
        monkeypatch.setenv("PYTHONPATH", str(LIBRARY))

    def run(self, fault: str = "nothing", **spec: Any) -> dict[str, Any]:
        self.environment.setenv("FAKE_GGUF_SPLIT", fault)
        return merge_worker.work(
            {
                "tool": str(self.tool),
                "splits": [str(path) for path in self.splits],
                "made_from": self.made_from(),
                "output": str(self.output),
                "receipt_dir": str(self.folder),
                **spec,
            },
            {},
            Progress(self.state, {"state": "running"}),
        )

    def made_from(self) -> dict[str, str]:
        return identities(dict.fromkeys(self.splits), Receipt(self.folder))

    def entry(self) -> Entry | None:
        return Receipt(self.folder).valid(self.output.name)

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} - {"receipt.json"}


@pytest.fixture
def merger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Merger:
    return Merger(tmp_path, monkeypatch)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def whole() -> bytes:
    """The model as one file, as a converter writes it."""
    return gguf(tiny_metadata(), {name: data for part in tiny_parts() for name, data in part.items()})


# --- the merge -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nothing", "order"])
def test_merged_file_is_verified_renamed_and_receipted(merger: Merger, fault: str) -> None:
    result = merger.run(fault)
    assert result["sha256"] == sha(merger.output)
    assert not result["adopted"]
    entry = merger.entry()
    assert entry is not None
    assert is_current(entry, merger.made_from(), None)
    merged = read(merger.output)
    check_set([merged])
    content = merger.output.read_bytes()
    for part in tiny_parts():
        for name, data in part.items():
            tensor = next(tensor for tensor in merged.tensors if tensor.name == name)
            assert content[tensor.offset : tensor.offset + tensor.nbytes] == data.data
    assert merger.files() == {path.name for path in merger.splits} | {"tiny.gguf"}


def test_merge_is_verified_while_the_tool_is_still_writing(merger: Merger, tmp_path: Path) -> None:
    """The progress passes the middle before the tool is let go on."""
    go = tmp_path / "go"
    merger.environment.setenv("FAKE_GGUF_SPLIT_GO", str(go))
    reached: list[int] = []
    original = Progress.at

    def at(progress: Progress, done: int) -> None:
        reached.append(done)
        if len(reached) == 3:  # half of the six tensors, all that has been written
            go.touch()
        original(progress, done)

    merger.environment.setattr(Progress, "at", at)
    runner = threading.Thread(target=merger.run, args=("pause",))
    runner.start()
    runner.join(30)
    assert not runner.is_alive(), "nothing was verified before the tool ended"
    assert merger.entry() is not None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("flip", r"tensor blk\.2\.ffn_down\.weight differs from tiny-00003-of-00003\.gguf within bytes 0 to 102"),
        (
            "short",
            r"/model/tiny\.gguf\.merging: .* ended with 0 after \d+ bytes, wanted \d+; is the disk full\? "
            r"/.*/model has \d+\.\d\d GB free\.",
        ),
        ("die", r"ended with 3 after .* It said: gguf_merge: failed to load input GGUF"),
        ("late", r"ended with 3 after (\d+) bytes, wanted \1;"),
        ("extra", r"ended with 0 after \d+ bytes, wanted \d+;"),
        ("silent", r"ended with 0 after 0 bytes, wanted 1; .* It said: nothing"),
    ],
)
def test_failed_merge_leaves_the_splits_and_nothing_else(merger: Merger, fault: str, message: str) -> None:
    before = {path: sha(path) for path in merger.splits}
    with pytest.raises(WorkerError, match=message):
        merger.run(fault)
    assert {path: sha(path) for path in merger.splits} == before
    assert merger.files() == {path.name for path in merger.splits}
    assert merger.entry() is None


def test_split_that_changes_during_the_merge_is_found(merger: Merger) -> None:
    layout = expected_layout(read_set(merger.splits))
    merger.run()
    segment = layout.segments[0]
    with segment.source.open("r+b") as file:
        file.seek(segment.source_offset)
        file.write(b"\xff")
    with pytest.raises(WorkerError, match=rf"tensor {segment.name} differs"):
        merge_worker.verify(merger.output, layout, lambda end: None)


def test_bytes_between_tensors_must_be_zero(merger: Merger) -> None:
    layout = expected_layout(read_set(merger.splits))
    merger.run()
    first = layout.segments[0]
    with merger.output.open("r+b") as file:
        file.seek(first.offset + first.nbytes)
        file.write(b"\x01")
    with pytest.raises(WorkerError, match="are not zero"):
        merge_worker.verify(merger.output, layout, lambda end: None)


def test_leftover_of_a_killed_merge_is_replaced(merger: Merger) -> None:
    (merger.folder / "tiny.gguf.merging").write_bytes(b"half")
    merger.run()
    assert merger.entry() is not None
    assert "tiny.gguf.merging" not in merger.files()


def test_tool_that_is_not_there_is_named(merger: Merger) -> None:
    merger.tool.unlink()
    with pytest.raises(WorkerError, match=r"llama-gguf-split: cannot be run: No such file"):
        merger.run()


def test_too_little_space_ends_before_the_tool_runs(merger: Merger) -> None:
    merger.tool.unlink()
    merger.environment.setattr(fetch, "free_bytes", lambda folder: 1000)
    with pytest.raises(WorkerError, match=r"0\.00 GB free, wanted 0\.07 GB"):
        merger.run()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount; the injected test above runs everywhere")
def test_too_small_file_system(merger: Merger, tmp_path: Path) -> None:
    """The same on a real file system of 256 KiB."""
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k none {small}"):  # a fixed command
        pytest.skip("tmpfs cannot be mounted here")
    try:
        with pytest.raises(WorkerError, match=r"small: 0\.00 GB free"):
            merger.run(output=str(small / "tiny.gguf"))
    finally:
        os.system(f"umount {small}")


def test_wanted_digest_must_be_met(merger: Merger) -> None:
    with pytest.raises(WorkerError, match=r"merged file's sha256 is [0-9a-f]{64}, wanted 0000"):
        merger.run(sha256="0" * 64)
    assert not merger.output.exists()


def test_splits_that_do_not_belong_together_are_not_merged(merger: Merger) -> None:
    split_set(merger.folder, "tiny", tiny_parts(3, 8), tiny_metadata(3, 8))[1].touch()
    other = tiny_set(merger.folder / "other")
    merger.splits[0].write_bytes(other[0].read_bytes())
    with pytest.raises(WorkerError, match=r"tiny-00002.* belongs to another model"):
        merger.run()


def test_alignment_that_the_tool_ignores_is_refused(tmp_path: Path) -> None:
    metadata = {**tiny_metadata(1), "general.alignment": u32(64)}
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf(metadata, tiny_parts(1)[0], alignment=64))
    with pytest.raises(GgufError, match="alignment is 64, but llama-gguf-split pads to 32"):
        expected_layout([read(path)])


# --- files that are there already ------------------------------------------------------------------


def test_file_merged_by_hand_is_adopted_after_comparison(merger: Merger) -> None:
    merger.output.write_bytes(whole())
    inode = merger.output.stat().st_ino
    result = merger.run("die")
    assert result["adopted"]
    assert merger.output.stat().st_ino == inode
    assert is_current(merger.entry(), merger.made_from(), None)


def test_file_with_the_wanted_digest_is_adopted_without_splits(merger: Merger) -> None:
    merger.output.write_bytes(whole())
    for path in merger.splits:
        path.unlink()
    result = merger.run("die", sha256=sha(merger.output))
    assert result["adopted"]
    assert is_current(merger.entry(), merger.made_from(), sha(merger.output))


def _of_other_data() -> bytes:
    tensors = {name: data for part in tiny_parts() for name, data in part.items()}
    tensors["blk.1.attn_norm.weight"] = f32(9, 9, 9, 9)
    return gguf(tiny_metadata(), tensors)


def _with_other_tensor() -> bytes:
    tensors = {name: data for part in tiny_parts() for name, data in part.items()}
    return gguf(tiny_metadata(), {**tensors, "extra": f32(1)})


def _of_other_type() -> bytes:
    tensors = {name: data for part in tiny_parts() for name, data in part.items()}
    tensors["blk.1.ffn_down.weight"] = Data((32, 3), 24, bytes(96))
    return gguf(tiny_metadata(), tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"mine", "not a GGUF file", id="not-gguf"),
        pytest.param(whole()[:-64], "truncated", id="truncated"),
        pytest.param(_of_other_data(), r"blk\.1\.attn_norm\.weight differs", id="other-data"),
        pytest.param(_with_other_tensor(), "extra, which no split holds", id="other-tensor"),
        pytest.param(_of_other_type(), r"is I8 \[32, 3\], wanted Q8_0 \[32, 3\]", id="other-type"),
        pytest.param(
            gguf(tiny_metadata(name="x"), {n: d for p in tiny_parts() for n, d in p.items()}),
            "general.name is not as in",
            id="other-metadata",
        ),
        pytest.param(
            gguf(tiny_metadata(), {n: d for p in tiny_parts()[:2] for n, d in p.items()}),
            "lacks 2 tensors",
            id="lacks-tensors",
        ),
    ],
)
def test_foreign_file_is_never_overwritten(merger: Merger, content: bytes, message: str) -> None:
    merger.output.write_bytes(content)
    with pytest.raises(WorkerError, match=rf"not made from these splits.*{message}"):
        merger.run()
    assert merger.output.read_bytes() == content
    assert merger.entry() is None


def test_own_file_of_other_splits_is_replaced_once_the_new_one_is_good(merger: Merger) -> None:
    merger.run()
    old = sha(merger.output)
    parts = tiny_parts(seed=1)
    merger.splits = split_set(merger.folder, "tiny", parts, tiny_metadata())
    assert not is_current(merger.entry(), merger.made_from(), None)
    with pytest.raises(WorkerError):
        merger.run("flip")
    assert sha(merger.output) == old
    merger.run()
    assert sha(merger.output) != old


# --- files that are there already, and splits that are not --------------------------------------


@pytest.fixture
def hub(merger: Merger, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The splits on a hub, and no longer on the host; the model merged by hand."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    files = {f"o/r/resolve/main/{path.name}": path.read_bytes() for path in merger.splits}
    for path in merger.splits:
        path.unlink()
    merger.output.write_bytes(whole())
    with Server() as network, Server(files, redirect_to=network.url, linked=True) as server:
        network.files = files
        yield server


def sources(hub: Server, merger: Merger, **known: Any) -> list[dict[str, Any]]:
    files = [{"path": path.name, **known} for path in merger.splits]
    return fetch.to_spec(fetch.wanted_files([{"url": f"{hub.url}/o/r/resolve/main", "files": files}]))


def test_file_is_adopted_with_the_headers_of_the_splits_alone(merger: Merger, hub: Server) -> None:
    result = merger.run("die", sources=sources(hub, merger))
    assert result["adopted"]
    assert result["sha256"] == sha(merger.output)
    entry = merger.entry()
    assert entry is not None
    assert entry.made_from == {
        Path(name).name: hashlib.sha256(content).hexdigest() for name, content in hub.files.items()
    }
    assert is_current(entry, merger.made_from(), None)
    assert all(request.method == "HEAD" or "Range" in request.headers for request in hub.requests)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(_of_other_data(), r"tiny-00002-of-00003\.gguf would have sha256 [0-9a-f]{64}, wanted", id="data"),
        pytest.param(_with_other_tensor(), "extra, which no split holds", id="tensor"),
        pytest.param(
            gguf(tiny_metadata(), {n: d for p in reversed(tiny_parts()) for n, d in p.items()}),
            "in another order than the splits",
            id="order",
        ),
    ],
)
def test_file_that_is_not_what_the_hub_has_is_refused(
    merger: Merger, hub: Server, content: bytes, message: str
) -> None:
    merger.output.write_bytes(content)
    with pytest.raises(WorkerError, match=message):
        merger.run("die", sources=sources(hub, merger))
    assert merger.output.read_bytes() == content
    assert merger.entry() is None


def test_tensors_of_an_adopted_file_are_not_fetched(merger: Merger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    large = Data((1 << 20, 2), 0, os.urandom(8 << 20))
    parts = [{**part, f"blk.{number}.ffn_up.weight": large} for number, part in enumerate(tiny_parts())]
    merger.splits = split_set(merger.folder, "tiny", parts, tiny_metadata())
    merger.output.write_bytes(gguf(tiny_metadata(), {name: data for part in parts for name, data in part.items()}))
    files = {f"o/r/resolve/main/{path.name}": path.read_bytes() for path in merger.splits}
    for path in merger.splits:
        path.unlink()
    with Server(files) as network, Server(files, redirect_to=network.url, linked=True) as server:
        assert merger.run("die", sources=sources(server, merger))["sha256"] == sha(merger.output)
        assert network.sent <= 3 << 20, "a MiB of each split holds its header"


def test_digest_of_the_profile_counts_before_the_hubs(merger: Merger, hub: Server) -> None:
    with pytest.raises(WorkerError, match="wanted 0000"):
        merger.run("die", sources=sources(hub, merger, sha256="0" * 64))


def test_hub_without_records_cannot_vouch_for_a_file(merger: Merger, hub: Server) -> None:
    hub.linked = False
    with pytest.raises(WorkerError, match="neither profile nor hub know its size and sha256"):
        merger.run("die", sources=sources(hub, merger))


def test_hub_without_ranges_is_said(merger: Merger, hub: Server) -> None:
    hub.redirect_to, hub.ranges = None, False
    known = [{**item, "sha256": "0" * 64, "size": 900} for item in sources(hub, merger)]
    with pytest.raises(WorkerError, match="gives no parts of files"):
        merger.run("die", sources=known)


# --- what counts as current ------------------------------------------------------------------------


def _entry(made_from: dict[str, str]) -> Entry:
    return Entry(1, 1, 1, "d" * 64, made_from)


@pytest.mark.parametrize(
    ("made_from", "sha256", "expected"),
    [
        ({"a": "1", "b": "2"}, None, True),
        ({"a": "1", "b": ""}, None, True),  # a split that was removed, and that no profile has a digest of
        ({"a": "1", "b": "3"}, None, False),
        ({"a": "1"}, None, False),
        ({"a": "1", "c": "2"}, None, False),
        ({"x": "9"}, "d" * 64, True),
        ({"a": "1", "b": "2"}, "e" * 64, False),
    ],
)
def test_current_is_what_was_made_from_the_wanted_splits(
    made_from: dict[str, str], sha256: str | None, expected: bool
) -> None:
    assert is_current(_entry({"a": "1", "b": "2"}), made_from, sha256) is expected


def test_nothing_is_current_without_a_receipt() -> None:
    assert not is_current(None, {}, None)


def test_identity_prefers_the_profile_then_the_receipt_then_the_file(merger: Merger) -> None:
    first, second, third = merger.splits
    receipt = Receipt(merger.folder)
    receipt.record(second.name, "b" * 64)
    found = identities({first: "a" * 64, second: None, third: None, merger.folder / "gone": None}, receipt)
    assert found[first.name] == "a" * 64
    assert found[second.name] == "b" * 64
    assert found[third.name].startswith(f"unverified:{third.stat().st_size}:")
    assert found["gone"] == ""
