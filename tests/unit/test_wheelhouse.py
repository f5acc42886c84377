"""A lock becomes one archive of exactly its wheels, or an error and nothing."""

from __future__ import annotations

import hashlib
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_wheels
from octoserve import wheelhouse
from octoserve.wheelhouse import Target, WheelhouseError

HASH = "--hash=sha256:" + "0" * 64
HERE = Target("3.11")


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip can see."""
    folder = tmp_path / "links"
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_lock_is_read_in_its_order() -> None:
    lock = f"# by hand\n\nzeta==2.0 \\\n    {HASH} \\\n    {HASH}\n    # via beta\nbeta[extra]==1.0 ; a == 'b' {HASH}\n"
    assert wheelhouse.pinned(lock) == ["zeta==2.0", "beta==1.0"]


@pytest.mark.parametrize(
    ("lock", "named"),
    [
        (f"alpha>=1.0 {HASH}\n", "alpha>=1.0"),
        (f"alpha==1.0 {HASH}\nbeta==1.0\n", "beta==1.0"),
        (f"alpha==1.0 {HASH[:-1]}\n", "alpha==1.0"),
        ("--index-url https://example.org/simple\n", "--index-url"),
        ("alpha @ https://example.org/alpha.whl\n", "alpha @"),
        ("# nothing\n", "no requirement"),
    ],
)
def test_what_is_no_lock_is_named(lock: str, named: str) -> None:
    with pytest.raises(WheelhouseError, match=named) as caught:
        wheelhouse.pinned(lock)
    assert "make lock" in str(caught.value)


def test_an_archive_is_named_by_all_that_goes_in(tmp_path: Path) -> None:
    paths = {
        wheelhouse.archive_path(tmp_path, "tools", lock, target)
        for lock in (b"one", b"two")
        for target in (Target("3.11"), Target("3.12"), Target("3.11", "aarch64"))
    }
    assert len(paths) == 6
    assert wheelhouse.archive_path(tmp_path, "tools", b"one", Target("3.11")) in paths
    assert all(path.parent == tmp_path and path.name.startswith("tools-") for path in paths)


def test_pip_is_asked_for_the_targets_wheels() -> None:
    options = Target("3.12", "aarch64").pip_options()
    assert options[:2] == ["--python-version=3.12", "--implementation=cp"]
    assert "--abi=cp312" in options
    platforms = [option for option in options if option.startswith("--platform=")]
    assert platforms[0] == "--platform=manylinux_2_35_aarch64"
    assert {"--platform=manylinux_2_28_aarch64", "--platform=manylinux2014_aarch64"} <= set(platforms)


def test_the_wheels_of_a_lock_are_packed(links: Path, tmp_path: Path) -> None:
    wheels = [tiny_wheels.greeter(links), tiny_wheels.wheel(links, "other", "2.0", {"other.py": "x = 1\n"})]
    tiny_wheels.greeter(links, "1.1")  # newer, and not locked
    lock = tiny_wheels.lock(tmp_path / "lock.txt", wheels)
    archive = tmp_path / "out" / "tools-0.32.0-cpu.tar"
    archive.parent.mkdir()
    of_another_run = archive.parent / ".tools-0.32.tar.partial"
    of_another_run.write_text("tools-0.32.0-cuda")
    assert wheelhouse.gather(lock, archive, HERE) == 2
    with tarfile.open(archive) as tar:
        packed = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert packed == {made.name: made.read_bytes() for made in wheels}
    assert sorted(path.name for path in archive.parent.iterdir()) == [of_another_run.name, archive.name]
    assert of_another_run.read_text() == "tools-0.32.0-cuda"

    again = tmp_path / "again.tar"
    wheelhouse.gather(lock, again, HERE)
    assert again.read_bytes() == archive.read_bytes(), "equal wheels make equal archives"


def test_another_file_under_the_same_name_is_refused(links: Path, tmp_path: Path) -> None:
    lock = tiny_wheels.lock(tmp_path / "lock.txt", [tiny_wheels.greeter(links)])
    found = tiny_wheels.wheel(links, "greeter", "1.0", {"greeter.py": "import evil\n"})
    with pytest.raises(WheelhouseError) as caught:
        wheelhouse.gather(lock, tmp_path / "out/tools.tar", HERE)
    assert hashlib.sha256(found.read_bytes()).hexdigest() in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wheel_that_is_nowhere_is_named(links: Path, tmp_path: Path) -> None:
    links.mkdir()
    lock = tiny_wheels.lock(tmp_path / "lock.txt", [tiny_wheels.greeter(tmp_path)])
    with pytest.raises(WheelhouseError, match=r"greeter==1\.0"):
        wheelhouse.gather(lock, tmp_path / "out/tools.tar", HERE)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_lock_for_other_machines_only_is_an_error(links: Path, tmp_path: Path) -> None:
    links.mkdir()
    lock = tmp_path / "lock.txt"
    lock.write_text(f"greeter==1.0 ; sys_platform == 'win32' {HASH}\n")
    with pytest.raises(WheelhouseError, match=r"Python 3\.11 on x86_64"):
        wheelhouse.gather(lock, tmp_path / "out/tools.tar", HERE)


def test_a_further_index_is_asked_for_what_the_first_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", tiny_wheels.index(tmp_path / "first", []))
    made = tiny_wheels.greeter(tmp_path)
    lock = tiny_wheels.lock(tmp_path / "lock.txt", [made])
    further = tiny_wheels.index(tmp_path / "further", [made])
    assert wheelhouse.gather(lock, tmp_path / "tools.tar", HERE, [further]) == 1


def test_two_runs_at_once_gather_once(links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tiny_wheels.lock(tmp_path / "lock.txt", [tiny_wheels.greeter(links)])
    archive = tmp_path / "out/tools.tar"
    gathered = []
    download = wheelhouse.download

    def slow(*arguments: Any) -> None:
        gathered.append(arguments)
        time.sleep(0.5)  # long enough for the other to begin
        download(*arguments)

    monkeypatch.setattr(wheelhouse, "download", slow)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: wheelhouse.gather(lock, archive, HERE), range(2))) == [1, 1]
    assert len(gathered) == 1
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]
