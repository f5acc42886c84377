"""Fetching: resume, retries, redirects, tokens, wrong digests, local folders; over real sockets."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Server
from octoserve import fetch, fetch_worker
from octoserve.fetch import FetchError, Plan, Wanted, check_space, plan, wanted_files
from octoserve.job import Progress, WorkerError
from octoserve.receipt import Receipt

CONTENT = random.Random(1).randbytes(3 << 20)
OTHER = random.Random(2).randbytes(3 << 20)
NAME = "model-00001-of-00001.gguf"
PATH = f"org/repo/resolve/main/sub/{NAME}"


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Fetcher:
    """A folder, and the worker run on it in this process."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "models" / "tiny"
        self.progress = Progress(root / "state.json", {"state": "running"})

    def wanted(self, base: str, size: int | None = len(CONTENT), digest: str | None = sha(CONTENT)) -> Wanted:
        files = [{"path": f"sub/{NAME}", "size": size, "sha256": digest}]
        return wanted_files([{"url": base, "files": files}])[0]

    def run(self, *wanted: Wanted, token: str | None = None, **more: Any) -> dict[str, Any]:
        spec = {"folder": str(self.folder), "files": fetch.to_spec(wanted), "backoff": 0.0, **more}
        return fetch_worker.work(spec, {"token": token}, self.progress)

    def path(self, suffix: str = "") -> Path:
        return self.folder / (NAME + suffix)

    def put(self, content: bytes, suffix: str = "") -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path(suffix).write_bytes(content)
        return self.path(suffix)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def fetcher(tmp_path: Path) -> Fetcher:
    return Fetcher(tmp_path)


@pytest.fixture
def hub() -> Iterator[Server]:
    with Server({PATH: CONTENT}) as server:
        yield server


def base(server: Server) -> str:
    return f"{server.url}/org/repo/resolve/main"


# --- downloads -------------------------------------------------------------------------------------


def test_file_is_fetched_verified_and_receipted(fetcher: Fetcher, hub: Server) -> None:
    item = fetcher.wanted(base(hub))
    result = fetcher.run(item)
    assert fetcher.path().read_bytes() == CONTENT
    assert result["files"] == [{"name": NAME, "size": len(CONTENT), "sha256": sha(CONTENT)}]
    assert result["fetched"] == [NAME]
    assert plan(fetcher.folder, [item]).complete
    assert not fetcher.path(".part").exists()
    # Compressed on the way, a part of a file could not be resumed.
    assert [request.headers["Accept-Encoding"] for request in hub.requests] == ["identity"] * 2


def test_broken_connections_are_resumed_where_they_broke(fetcher: Fetcher, hub: Server) -> None:
    hub.break_after = [1 << 20, 1000]
    fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT
    assert hub.sent == len(CONTENT), "no byte twice"
    assert [request.headers.get("Range") for request in hub.gets()] == [
        None,
        f"bytes={1 << 20}-",
        f"bytes={(1 << 20) + 1000}-",
    ]


def test_later_run_resumes_the_part(fetcher: Fetcher, hub: Server) -> None:
    fetcher.put(CONTENT[:2_000_000], ".part")
    result = fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT
    assert hub.sent == len(CONTENT) - 2_000_000
    assert result["fetched"] == [NAME]


def test_short_file_of_a_broken_download_is_resumed(fetcher: Fetcher, hub: Server) -> None:
    fetcher.put(CONTENT[:1_500_000])
    fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT
    assert hub.sent == len(CONTENT) - 1_500_000


def test_part_of_another_revision_is_fetched_again_from_the_start(fetcher: Fetcher, hub: Server) -> None:
    fetcher.put(OTHER[:1_000_000], ".part")
    fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT


def test_part_that_is_too_long_is_fetched_again(fetcher: Fetcher, hub: Server) -> None:
    fetcher.put(CONTENT + b"more", ".part")
    fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT


def test_complete_part_needs_no_request_for_data(fetcher: Fetcher, hub: Server) -> None:
    fetcher.put(CONTENT, ".part")
    fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT
    assert not hub.gets()


def test_server_without_ranges_starts_again(fetcher: Fetcher, hub: Server) -> None:
    hub.ranges, hub.break_after = False, [1 << 20]
    fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT


def test_file_that_changes_between_two_requests_is_not_glued_together(fetcher: Fetcher, hub: Server) -> None:
    """The ETag of the first answer goes along as If-Range, so the server sends the new file whole."""
    hub.files[PATH], hub.later, hub.break_after = OTHER, CONTENT, [1 << 20]
    fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT
    assert hub.gets()[1].headers["If-Range"] == f'"{sha(OTHER)}"'


def test_busy_server_is_asked_again(fetcher: Fetcher, hub: Server) -> None:
    hub.statuses = [503, 429, 500]
    fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT


def test_endless_failures_end_and_keep_what_arrived(fetcher: Fetcher, hub: Server) -> None:
    hub.break_after, hub.statuses = [1_000_000], [0, *[503] * 50]
    item = fetcher.wanted(base(hub))
    with pytest.raises(WorkerError, match=r"gave up after 9 failures in a row at byte 1000000.*503.*resume"):
        fetcher.run(item)
    assert fetcher.path(".part").stat().st_size == 1_000_000
    hub.statuses = []
    fetcher.run(item)
    assert fetcher.path().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "message"), [(403, "licence accepted"), (404, "check organisation"), (410, "HTTP 410")]
)
def test_refusal_is_not_tried_again(fetcher: Fetcher, hub: Server, status: int, message: str) -> None:
    hub.statuses = [status]
    with pytest.raises(WorkerError, match=message):
        fetcher.run(fetcher.wanted(base(hub)))
    assert len(hub.gets()) == 1


def test_file_that_is_not_on_the_hub_is_named(fetcher: Fetcher, hub: Server) -> None:
    hub.files.clear()
    with pytest.raises(WorkerError, match=rf"{NAME}: HTTP 404"):
        fetcher.run(fetcher.wanted(base(hub)))


def test_wrong_size_is_found_before_the_download(fetcher: Fetcher, hub: Server) -> None:
    with pytest.raises(WorkerError, match=rf"has {len(CONTENT)} bytes, wanted 7"):
        fetcher.run(fetcher.wanted(base(hub), size=7))
    assert not hub.gets()


# --- redirects and tokens --------------------------------------------------------------------------


def test_token_goes_to_the_hub_and_never_to_its_content_network(fetcher: Fetcher) -> None:
    with Server({PATH: CONTENT}) as network, Server({PATH: CONTENT}, token="hf_t", redirect_to=network.url) as hub:
        fetcher.run(fetcher.wanted(base(hub)), token="hf_t")
        assert fetcher.path().read_bytes() == CONTENT
        assert network.gets()
        assert all("Authorization" not in request.headers for request in network.requests)
        assert all(request.headers["Authorization"] == "Bearer hf_t" for request in hub.requests)


def test_netrc_of_the_host_is_not_sent(fetcher: Fetcher, hub: Server, tmp_path: Path, monkeypatch: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    fetcher.run(fetcher.wanted(base(hub)))
    assert all("Authorization" not in request.headers for request in hub.requests)


def test_missing_token_is_said(fetcher: Fetcher, hub: Server) -> None:
    hub.token = "hf_t"
    with pytest.raises(WorkerError, match="HTTP 401: a token is needed"):
        fetcher.run(fetcher.wanted(base(hub)))


def test_endless_redirect_ends(fetcher: Fetcher, hub: Server) -> None:
    hub.redirect_to = hub.url
    with pytest.raises(WorkerError, match="more than 5 redirects"):
        fetcher.run(fetcher.wanted(base(hub)))


# --- digests ---------------------------------------------------------------------------------------


def test_hub_that_records_another_digest_is_believed_before_the_download(fetcher: Fetcher) -> None:
    with Server() as network, Server({PATH: CONTENT}, redirect_to=network.url, linked=True) as hub:
        with pytest.raises(WorkerError, match=rf"sha256 is {sha(CONTENT)}, wanted {sha(OTHER)}.*Nothing was fetched"):
            fetcher.run(fetcher.wanted(base(hub), digest=sha(OTHER)))
        assert not network.gets()


def test_wrong_digest_is_an_error_and_a_corrected_profile_takes_the_kept_file(fetcher: Fetcher, hub: Server) -> None:
    with pytest.raises(WorkerError, match=rf"sha256 is {sha(CONTENT)}, wanted {sha(OTHER)}.*kept as .*\.bad"):
        fetcher.run(fetcher.wanted(base(hub), digest=sha(OTHER)))
    assert not fetcher.path().exists()
    sent = hub.sent
    result = fetcher.run(fetcher.wanted(base(hub)))
    assert fetcher.path().read_bytes() == CONTENT
    assert hub.sent == sent, "nothing is fetched twice"
    assert result["adopted"] == [NAME]
    assert not fetcher.path(".bad").exists()


def test_good_file_replaces_a_bad_one_that_is_then_removed(fetcher: Fetcher, hub: Server) -> None:
    hub.files[PATH] = OTHER
    item = fetcher.wanted(base(hub))
    with pytest.raises(WorkerError, match=r"kept as"):
        fetcher.run(item)
    assert fetcher.path(".bad").read_bytes() == OTHER
    hub.files[PATH] = CONTENT
    fetcher.run(item)
    assert fetcher.path().read_bytes() == CONTENT
    assert not fetcher.path(".bad").exists()


def test_file_put_there_by_hand_is_verified_and_adopted(fetcher: Fetcher, hub: Server) -> None:
    fetcher.put(CONTENT)
    item = fetcher.wanted(base(hub))
    assert plan(fetcher.folder, [item]).unverified == (item,)
    result = fetcher.run(item)
    assert result["adopted"] == [NAME]
    assert not hub.gets()
    assert plan(fetcher.folder, [item]).complete


def test_wrong_file_put_there_by_hand_is_replaced(fetcher: Fetcher, hub: Server) -> None:
    fetcher.put(OTHER)
    result = fetcher.run(fetcher.wanted(base(hub)))
    assert result["fetched"] == [NAME]
    assert fetcher.path().read_bytes() == CONTENT


def test_verified_file_of_another_revision_stays_until_the_new_one_is_good(fetcher: Fetcher, hub: Server) -> None:
    fetcher.run(fetcher.wanted(base(hub)))
    hub.files[PATH] = b"x" * len(OTHER)
    with pytest.raises(WorkerError):
        fetcher.run(fetcher.wanted(base(hub), digest=sha(OTHER)))
    assert fetcher.path().read_bytes() == CONTENT
    assert Receipt(fetcher.folder).valid(NAME) is not None
    hub.files[PATH] = OTHER
    fetcher.run(fetcher.wanted(base(hub), digest=sha(OTHER)))
    assert fetcher.path().read_bytes() == OTHER


def test_unknown_size_and_digest_come_from_the_hubs_record(fetcher: Fetcher) -> None:
    with Server({PATH: OTHER}) as network, Server({PATH: CONTENT}, redirect_to=network.url, linked=True) as hub:
        item = fetcher.wanted(base(hub), None, None)
        with pytest.raises(WorkerError, match=rf"sha256 is {sha(OTHER)}, wanted {sha(CONTENT)}"):
            fetcher.run(item)
        network.files[PATH] = CONTENT
        fetcher.run(item)
        assert plan(fetcher.folder, [item]).complete


def test_digest_that_nobody_knows_is_pinned_by_the_first_fetch(fetcher: Fetcher, hub: Server) -> None:
    item = fetcher.wanted(base(hub), None, None)
    result = fetcher.run(item)
    assert result["files"][0]["sha256"] == sha(CONTENT)
    hub.files[PATH] = OTHER
    assert plan(fetcher.folder, [item]).complete, "what was pinned stays"


def test_leftovers_are_removed_and_other_files_are_not(fetcher: Fetcher, hub: Server) -> None:
    fetcher.put(b"old", ".part")
    leftover = fetcher.folder / "old-name.gguf.part"
    other = fetcher.folder / "notes.txt"
    leftover.write_bytes(b"half")
    other.write_text("mine")
    fetcher.run(fetcher.wanted(base(hub)))
    assert not leftover.exists()
    assert other.read_text() == "mine"


# --- folders on the host ---------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "share"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / NAME).write_bytes(CONTENT)
    return folder


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_file_comes_from_a_folder(fetcher: Fetcher, local: Path, form: str) -> None:
    fetcher.run(fetcher.wanted(form.format(local)))
    assert fetcher.path().read_bytes() == CONTENT
    assert fetcher.path().stat().st_ino != (local / "sub" / NAME).stat().st_ino


def test_link_shares_the_file(fetcher: Fetcher, local: Path) -> None:
    fetcher.run(fetcher.wanted(str(local)), link=True)
    assert fetcher.path().stat().st_ino == (local / "sub" / NAME).stat().st_ino


def test_link_across_file_systems_is_a_copy(fetcher: Fetcher, local: Path, monkeypatch: Any) -> None:
    def refuse(*names: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    fetcher.run(fetcher.wanted(str(local)), link=True)
    assert fetcher.path().read_bytes() == CONTENT


@pytest.mark.parametrize("link", [False, True])
def test_wrong_digest_in_a_folder_leaves_both_sides_alone(fetcher: Fetcher, local: Path, link: bool) -> None:
    with pytest.raises(WorkerError, match=rf"sha256 is {sha(CONTENT)}, wanted {sha(OTHER)}"):
        fetcher.run(fetcher.wanted(str(local), digest=sha(OTHER)), link=link)
    assert (local / "sub" / NAME).read_bytes() == CONTENT
    assert list(fetcher.folder.glob(f"{NAME}*")) == []


def test_lfs_pointer_in_a_folder_is_recognized(fetcher: Fetcher, local: Path) -> None:
    (local / "sub" / NAME).write_text("version https://git-lfs.github.com/spec/v1\nsize 5\n")
    with pytest.raises(WorkerError, match="Git LFS pointer"):
        fetcher.run(fetcher.wanted(str(local), None, None))


def test_file_missing_in_a_folder_is_named(fetcher: Fetcher, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=rf"nowhere/sub/{NAME}: there is no such file"):
        fetcher.run(fetcher.wanted(str(tmp_path / "nowhere")))


# --- plan ------------------------------------------------------------------------------------------


def test_plan_of_a_folder_that_is_not_there(fetcher: Fetcher) -> None:
    item = fetcher.wanted("https://hub/org/repo/resolve/main")
    assert plan(fetcher.folder, [item]) == Plan((), (), (item,), (), len(CONTENT), 0)


def test_plan_counts_what_a_part_has(fetcher: Fetcher) -> None:
    fetcher.put(CONTENT[:1000], ".part")
    assert plan(fetcher.folder, [fetcher.wanted("https://h/r")]).bytes_to_fetch == len(CONTENT) - 1000


def test_touched_file_is_not_present_any_more(fetcher: Fetcher, hub: Server) -> None:
    item = fetcher.wanted(base(hub))
    fetcher.run(item)
    os.utime(fetcher.path())
    assert plan(fetcher.folder, [item]).unverified == (item,)


def test_too_little_space_ends_before_the_first_byte(fetcher: Fetcher, hub: Server, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetch, "free_bytes", lambda folder: 1000)
    with pytest.raises(WorkerError, match=r"0\.00 GB free, wanted 0\.07 GB"):
        fetcher.run(fetcher.wanted(base(hub)))
    assert not hub.gets()


def test_room_for_a_later_merge_is_asked_for_before_the_first_byte(
    fetcher: Fetcher, hub: Server, monkeypatch: Any
) -> None:
    """Sizes that no profile knows come from the hub; a download that cannot be merged is not begun."""
    item = fetcher.wanted(base(hub), None, None)
    monkeypatch.setattr(fetch, "free_bytes", lambda folder: fetch.RESERVE + len(CONTENT) * 2 - 1)
    with pytest.raises(WorkerError, match="merging takes the size of the model once more"):
        fetcher.run(item, merge_later=[NAME])
    assert not hub.gets()
    fetcher.run(item)
    with pytest.raises(WorkerError, match="merging takes"):
        monkeypatch.setattr(fetch, "free_bytes", lambda folder: fetch.RESERVE + len(CONTENT) - 1)
        fetcher.run(item, merge_later=[NAME])


def test_space_check_counts_the_reserve(tmp_path: Path) -> None:
    check_space(tmp_path, 1000, free=1000 + fetch.RESERVE)
    with pytest.raises(FetchError, match="free space or choose another folder"):
        check_space(tmp_path, 1000, free=999 + fetch.RESERVE)


@pytest.mark.parametrize(
    ("entry", "url", "message"),
    [
        ({"path": "a", "size": 1, "sha256": "12"}, "/x", "wanted 64 hexadecimal digits"),
        ({"path": "../a", "size": 1, "sha256": None}, "/x", "relative path without"),
        ({"path": "a", "name": "/etc/passwd", "size": 1, "sha256": None}, "/x", "relative path without"),
        ({"path": "a.part", "size": 1, "sha256": None}, "/x", "unfinished files"),
        ({"path": "a", "size": 1, "sha256": None}, "ftp://x", "wanted https://"),
    ],
)
def test_bad_source_is_refused(entry: dict[str, Any], url: str, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        wanted_files([{"url": url, "files": [entry]}])


def test_two_files_of_one_name_need_a_name() -> None:
    def sources(name: str) -> list[dict[str, Any]]:
        return [
            {"url": "/a", "files": [{"path": "config.json"}]},
            {"url": "/b", "files": [{"path": "config.json", "name": name}]},
        ]

    with pytest.raises(FetchError, match=r"config\.json: wanted twice \(/a/config\.json and /b\)"):
        wanted_files(sources(""))
    assert [item.name for item in wanted_files(sources("other.json"))] == ["config.json", "other.json"]
