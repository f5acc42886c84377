"""Records of deployments are numbered, never change, and `current` points at one that passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from octoserve import deployment
from octoserve.deployment import DeploymentError

ONE: dict[str, Any] = {"profile": "demo", "release": "engine-1", "environment": {"A": 1, "B": "x"}}
TWO = {**ONE, "release": "engine-2"}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_records_are_numbered_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "deployments/main"
    assert deployment.numbers(folder) == []
    assert [deployment.record(folder, content) for content in (ONE, TWO, ONE)] == [1, 2, 3]
    assert deployment.numbers(folder) == [1, 2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["0001", "0002", "0003"]
    assert [deployment.read(folder, number) for number in (1, 2, 3)] == [ONE, TWO, ONE]
    assert deployment.state(folder, 1) == "recorded"


def test_numbers_go_on_behind_four_digits(tmp_path: Path) -> None:
    for number in (9998, 9999):
        (tmp_path / deployment.name_of(number)).mkdir()
        (tmp_path / deployment.name_of(number) / deployment.RECORD).write_text("{}")
    assert [deployment.record(tmp_path, ONE), deployment.record(tmp_path, TWO)] == [10000, 10001]
    assert deployment.numbers(tmp_path) == [9998, 9999, 10000, 10001]


def test_only_the_newest_record_is_found_by_its_content(tmp_path: Path) -> None:
    for content in (ONE, TWO, ONE):
        deployment.record(tmp_path, content)
    turned = dict(reversed(ONE.items()))
    assert deployment.find(tmp_path, turned) == 3, "whatever the order of keys"
    assert deployment.find(tmp_path, TWO) is None, "what runs must be the highest number"
    assert deployment.find(tmp_path, {**ONE, "environment": {"A": 1}}) is None
    assert deployment.find(tmp_path / "nowhere", ONE) is None


def test_a_record_never_changes(tmp_path: Path) -> None:
    deployment.record(tmp_path, ONE)
    before = (tmp_path / "0001" / deployment.RECORD).read_bytes()
    deployment.set_state(tmp_path, 1, "passed")
    deployment.make_current(tmp_path, 1)
    deployment.record(tmp_path, TWO)
    assert (tmp_path / "0001" / deployment.RECORD).read_bytes() == before


def test_a_state_is_news_once(tmp_path: Path) -> None:
    deployment.record(tmp_path, ONE)
    assert deployment.set_state(tmp_path, 1, "passed") is True
    kept = snapshot(tmp_path)
    assert deployment.set_state(tmp_path, 1, "passed") is False
    assert snapshot(tmp_path) == kept
    assert deployment.state(tmp_path, 1) == "passed"


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_a_damaged_state_counts_as_recorded(tmp_path: Path, content: str) -> None:
    deployment.record(tmp_path, ONE)
    (tmp_path / "0001" / deployment.STATE).write_text(content)
    assert deployment.state(tmp_path, 1) == "recorded"
    assert deployment.set_state(tmp_path, 1, "failed") is True
    assert deployment.state(tmp_path, 1) == "failed"


def test_current_points_at_one(tmp_path: Path) -> None:
    for content in (ONE, TWO):
        deployment.record(tmp_path, content)
    assert deployment.current(tmp_path) is None
    assert [deployment.make_current(tmp_path, number) for number in (1, 1, 2)] == [True, False, True]
    assert deployment.current(tmp_path) == 2
    assert str((tmp_path / "current").readlink()) == "0002", "relative, so that the folder can be moved"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001", "0002", "current"]


def test_current_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed controller leaves the old link or the new one."""
    for content in (ONE, TWO):
        deployment.record(tmp_path, content)
    deployment.make_current(tmp_path, 1)
    seen = []
    replace = Path.replace

    def watched(path: Path, target: Path) -> Path:
        seen.append(deployment.current(tmp_path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    deployment.make_current(tmp_path, 2)
    assert (seen, deployment.current(tmp_path)) == ([1], 2)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_record_is_named(tmp_path: Path, content: bytes) -> None:
    deployment.record(tmp_path, ONE)
    (tmp_path / "0001" / deployment.RECORD).write_bytes(content)
    for act in (lambda: deployment.read(tmp_path, 1), lambda: deployment.find(tmp_path, ONE)):
        with pytest.raises(DeploymentError, match=r"0001/deployment\.json: .*restore it, or remove its folder"):
            act()
    assert deployment.record(tmp_path, ONE) == 2


def test_a_record_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"0007/deployment\.json"):
        deployment.read(tmp_path, 7)


def test_a_link_to_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("elsewhere")
    with pytest.raises(DeploymentError, match=r"current points at elsewhere, wanted a number; remove it"):
        deployment.current(tmp_path)


def test_what_a_killed_run_left_does_not_count(tmp_path: Path) -> None:
    deployment.record(tmp_path, ONE)
    partial = tmp_path / ".0002.partial"
    partial.mkdir()
    (partial / deployment.RECORD).write_text('{"half": ')
    assert deployment.numbers(tmp_path) == [1]
    assert deployment.record(tmp_path, TWO) == 2
    assert deployment.read(tmp_path, 2) == TWO
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001", "0002"]


def test_a_folder_whose_record_is_gone_keeps_its_number(tmp_path: Path) -> None:
    """Else the next record would be refused for ever: its place is taken."""
    for content in (ONE, TWO):
        deployment.record(tmp_path, content)
    (tmp_path / "0002" / deployment.RECORD).unlink()
    assert deployment.numbers(tmp_path) == [1]
    assert deployment.record(tmp_path, TWO) == 3
