"""Only what nobody uses goes from /dev/shm. Real files and processes, in a folder of their own."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from octoserve import guard_shm


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(guard_shm, "SHARED_MEMORY", tmp_path)
    return tmp_path


def fill(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * 10000)
    return path


def user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def test_stale_files_go_and_used_ones_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale, nested = fill(folder / "psm_stale"), fill(folder / "vllm/offload.mmap")
    opened, mapped = fill(folder / "psm_open"), fill(folder / "psm_mapped")
    with opened.open("rb"), mapped.open("rb+") as file:
        view = mmap.mmap(file.fileno(), 0)
        file.close()  # what is mapped needs no open file
        assert guard_shm.main([f"--user={user()}"]) == 0
        view.close()
    assert (stale.exists(), nested.exists(), opened.exists(), mapped.exists()) == (False, False, True, True)
    assert "removed 2 stale file(s)" in capsys.readouterr().out


def test_files_of_others_and_links_stay(folder: Path) -> None:
    fill(folder / "theirs")
    (folder / "link").symlink_to(fill(folder / "target"))
    (folder / "folder").mkdir()
    assert guard_shm.owned(folder, os.getuid() + 1) == {}
    assert set(guard_shm.owned(folder, os.getuid())) == {folder / "theirs", folder / "target"}


def test_nothing_to_remove_is_no_news(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guard_shm.main([f"--user={user()}"]) == 0
    assert capsys.readouterr().out == ""


def test_an_unknown_account_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as error:
        guard_shm.main(["--user=nobody-of-this-name"])
    assert error.value.code == 2
