"""Findings about disks: room against what is still to come, and a reading that stays within its bounds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from octoserve import fetch, preflight_disk
from octoserve.finding import CANNOT_SEE, ERROR, OK, WARNING
from octoserve.preflight_disk import Model, Need, Reading

GB = 10**9
MIB = 1 << 20
URL = "https://hub.example/org/repo/resolve/main"


def model(folder: Path, *sizes: int | None, linked: bool = False, url: str = URL) -> Model:
    """A model of splits with these sizes, merged where there are several, and a config."""
    count = len(sizes)
    names = [f"m-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)] if count > 1 else ["m.gguf"]
    entries = [{"path": name, "size": size} for name, size in zip(names, sizes)]
    files = fetch.wanted_files([{"url": url, "files": [*entries, {"path": "config.json", "size": 1000}]}])
    return Model(folder, files, preflight_disk.merged_path(folder, files), linked)


def needs(found: Model) -> dict[str, int | None]:
    return {need.what: need.size for need in found.needs()}


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def test_a_merge_needs_the_model_twice(tmp_path: Path) -> None:
    assert needs(model(tmp_path, 50 * GB, 40 * GB)) == {"model files": 90 * GB + 1000, "merged model": 90 * GB}
    assert needs(model(tmp_path, 90 * GB)) == {"model files": 90 * GB + 1000}, "one file is not merged"


def test_what_is_there_is_not_needed_again(tmp_path: Path) -> None:
    found = model(tmp_path, 50 * MIB, 40 * MIB)
    sparse(tmp_path / "m-00001-of-00002.gguf", 50 * MIB)
    assert needs(found) == {"model files": 40 * MIB + 1000, "merged model": 90 * MIB}
    sparse(tmp_path / "m-00002-of-00002.gguf.part", 30 * MIB)
    assert needs(found)["model files"] == 10 * MIB + 1000, "a download goes on where it stopped"
    sparse(tmp_path / "m.gguf", 90 * MIB)
    assert needs(found) == {"model files": 1000}, "once merged, the splits are not fetched again"
    assert found.size() == 90 * MIB


def test_hard_links_take_no_room(tmp_path: Path) -> None:
    assert needs(model(tmp_path, 9 * GB, linked=True, url="/srv/models")) == {"model files": 0}


def test_a_size_that_the_profile_does_not_know(tmp_path: Path) -> None:
    found = model(tmp_path, None, 40 * MIB)
    assert (found.size(), needs(found)) == (None, {"model files": None, "merged model": None})
    sparse(tmp_path / "m-00001-of-00002.gguf", 50 * MIB)
    assert found.size() == 90 * MIB, "the file that is there says it"


def with_free(free: int) -> Callable[[Path], int]:
    return lambda path: free


def test_room(tmp_path: Path) -> None:
    wanted = [Need("model files", tmp_path / "models", 90 * GB), Need("release", tmp_path / "opt", 10 * GB)]
    (found,) = preflight_disk.room(wanted, with_free(200 * GB))
    assert (found.verdict, found.name) == (OK, f"room at {tmp_path}")
    assert found.wanted == "100.07 GB (model files 90.00 GB, release 10.00 GB)"
    (found,) = preflight_disk.room(wanted, with_free(100 * GB))
    assert (found.verdict, found.measured) == (ERROR, "100.00 GB free"), "the two lie on one disk and add up"


def test_room_for_an_unknown_size(tmp_path: Path) -> None:
    wanted = [Need("model files", tmp_path, None), Need("release", tmp_path, 10 * GB)]
    (found,) = preflight_disk.room(wanted, with_free(200 * GB))
    assert (found.verdict, "model files, whose size is not known yet" in found.wanted) == (CANNOT_SEE, True)
    (found,) = preflight_disk.room(wanted, with_free(9 * GB))
    assert found.verdict == ERROR, "too little for what is known is too little"


def test_room_on_two_file_systems(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own here")
    found = preflight_disk.room(
        [Need("model files", tmp_path, GB), Need("release", other, 2 * GB)], with_free(100 * GB)
    )
    assert [finding.name for finding in found] == [f"room at {tmp_path}", "room at /dev/shm"]


def gives(rate: float) -> Callable[[Path, int], Reading]:
    return lambda path, most: Reading(most, rate, True)


@pytest.mark.parametrize(("rate", "verdict"), [(1.0 * GB, OK), (0.29 * GB, WARNING)])
def test_speed_against_the_time_of_a_start(tmp_path: Path, rate: float, verdict: str) -> None:
    """402 GB within half of 2700 s take 0.298 GB/s."""
    found = preflight_disk.speed(model(tmp_path, 402 * GB), 2700, may_write=True, measure=gives(rate))
    assert found.verdict == verdict
    assert ("1386 s for the model" in found.measured) == (verdict == WARNING)


def test_speed_for_a_model_of_unknown_size(tmp_path: Path) -> None:
    found = preflight_disk.speed(model(tmp_path, None), 2700, may_write=True, measure=gives(1e3))
    assert (found.verdict, "no bound" in found.wanted) == (OK, True)


def test_a_large_file_of_the_model_is_read_and_nothing_is_written(tmp_path: Path) -> None:
    found = model(tmp_path, 20 * MIB, 30 * MIB)
    for item in found.splits:
        sparse(tmp_path / item.name, item.size or 0)
    read: list[Path] = []

    def measure(path: Path, most: int) -> Reading:
        read.append(path)
        return Reading(most, GB, True)

    preflight_disk.speed(found, 600, may_write=False, measure=measure)
    assert read == [tmp_path / "m-00002-of-00002.gguf"], "the largest"
    assert len(list(tmp_path.iterdir())) == 2


def test_check_mode_writes_no_file(tmp_path: Path) -> None:
    found = preflight_disk.speed(model(tmp_path / "models", 20 * MIB), 600, may_write=False)
    assert found.verdict == CANNOT_SEE
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_file_is_no_larger_than_the_model_and_removed(tmp_path: Path) -> None:
    sizes: list[int] = []

    def measure(path: Path, most: int) -> Reading:
        sizes.append(path.stat().st_size)
        return preflight_disk.read_speed(path, most)

    found = preflight_disk.speed(model(tmp_path / "models/m", 17 * MIB), 600, may_write=True, measure=measure)
    assert found.verdict == OK
    assert 8 * MIB <= sizes[0] <= 24 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    found = preflight_disk.speed(model(tmp_path, GB), 600, may_write=True)
    assert (found.verdict, "Read-only file system" in found.measured) == (CANNOT_SEE, True)


def test_reading_stops_at_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(40 * MIB))
    assert preflight_disk.read_speed(path, 16 * MIB).size == 16 * MIB
    assert preflight_disk.read_speed(path, 1 << 40).size == 40 * MIB
    with pytest.raises(OSError, match="large gave nothing"):
        preflight_disk.read_speed(path, 16 * MIB, seconds=0)
