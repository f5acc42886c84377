"""What was set up by hand gives way, and comes back as it stood; at boot, too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from octoserve import deployment, give_way, recover
from octoserve.give_way import GiveWayError, Stood

UNIT = "glm5.service"
#: A systemctl with one unit, whose state it keeps in files beside itself and whose orders it writes down.
FAKE_SYSTEMCTL = """#!/bin/sh
cd "$(dirname "$0")"
case "$1" in
show) echo "LoadState=$(cat load)"; echo "ActiveState=$(cat active)"; echo "UnitFileState=$(cat boot)"; exit ;;
esac
echo "$@" >> orders
[ "$1" = --no-block ] && shift
[ -e refuses ] && { echo "Job failed." >&2; exit 1; }
[ "$2" = glm5.service ] || exit 0
case "$1" in
stop) echo inactive > active ;;
start) echo active > active ;;
enable) echo enabled > boot ;;
disable) echo disabled > boot ;;
esac
"""


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = folder / "systemctl"
    tool.write_text(FAKE_SYSTEMCTL)
    tool.chmod(0o755)
    for name, state in (("load", "loaded"), ("active", "active"), ("boot", "enabled"), ("orders", "")):
        (folder / name).write_text(state)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "main"
    deployment.record(made, {"unit": "[Service]\n", "environment": {}})
    return made


def orders(systemctl: Path) -> list[str]:
    return (systemctl / "orders").read_text().splitlines()


def test_it_is_stopped_and_comes_back_as_it_stood(systemctl: Path, folder: Path) -> None:
    assert give_way.step_aside(folder, UNIT)
    assert give_way.read(folder) == Stood(UNIT, active=True, enabled=True)
    assert orders(systemctl) == [f"stop {UNIT}"]
    assert not give_way.step_aside(folder, UNIT), "a second run changes nothing"
    assert give_way.come_back(folder) == UNIT
    assert orders(systemctl)[1:] == [f"enable {UNIT}", f"start {UNIT}"]
    assert give_way.come_back(folder) == "", "once is enough"


def test_one_that_starts_again_meanwhile_gives_way_again_and_comes_back_as_it_first_stood(
    systemctl: Path, folder: Path
) -> None:
    (systemctl / "boot").write_text("disabled")
    give_way.step_aside(folder, UNIT)
    (systemctl / "active").write_text("active")
    (systemctl / "boot").write_text("enabled")
    assert give_way.step_aside(folder, UNIT)
    assert give_way.read(folder) == Stood(UNIT, active=True, enabled=False)


@pytest.mark.parametrize(("load", "active", "boot"), [("not-found", "inactive", ""), ("loaded", "failed", "disabled")])
def test_one_that_does_not_serve_is_left_alone_and_never_started(
    systemctl: Path, folder: Path, load: str, active: str, boot: str
) -> None:
    for name, state in (("load", load), ("active", active), ("boot", boot)):
        (systemctl / name).write_text(state)
    assert not give_way.step_aside(folder, UNIT)
    assert give_way.come_back(folder) == ""
    assert orders(systemctl) == []


def test_one_that_was_removed_meanwhile_is_forgotten_and_not_called_started(systemctl: Path, folder: Path) -> None:
    give_way.step_aside(folder, UNIT)
    (systemctl / "load").write_text("not-found")
    assert give_way.come_back(folder, dry=True) == ""
    assert give_way.come_back(folder) == ""
    assert give_way.read(folder) is None
    assert orders(systemctl) == [f"stop {UNIT}"]


def test_after_a_deployment_has_passed_it_starts_no_more(systemctl: Path, folder: Path) -> None:
    give_way.step_aside(folder, UNIT)
    assert give_way.retire(folder) == UNIT
    assert orders(systemctl)[1:] == [f"disable {UNIT}"]
    assert not give_way.step_aside(folder, UNIT), "left in the inventory, it changes nothing"
    assert give_way.retire(folder) == ""


def test_one_that_never_starts_at_boot_is_not_disabled(systemctl: Path, folder: Path) -> None:
    (systemctl / "boot").write_text("static")
    assert give_way.step_aside(folder, UNIT)
    assert give_way.retire(folder) == UNIT
    assert orders(systemctl) == [f"stop {UNIT}"]
    assert not give_way.step_aside(folder, UNIT)


def test_a_check_changes_nothing(systemctl: Path, folder: Path) -> None:
    assert give_way.step_aside(folder, UNIT, dry=True)
    assert give_way.read(folder) is None
    give_way.step_aside(folder, UNIT)
    assert (give_way.come_back(folder, dry=True), give_way.retire(folder, dry=True)) == (UNIT, UNIT)
    assert orders(systemctl) == [f"stop {UNIT}"]


def test_one_that_does_not_stop_is_told(systemctl: Path, folder: Path) -> None:
    (systemctl / "refuses").touch()
    with pytest.raises(GiveWayError, match=r"systemctl stop glm5.service ended with 1: Job failed."):
        give_way.step_aside(folder, UNIT)


def test_after_a_power_cut_in_the_first_deploy_it_starts_instead(systemctl: Path, folder: Path, tmp_path: Path) -> None:
    give_way.step_aside(folder, UNIT)
    words = [str(folder), "--unit-file", "/etc/systemd/system/octoserve-main.service"]
    assert recover.main([*words, "--environment-file", str(tmp_path / "main.env")]) == 0
    assert orders(systemctl)[1:] == [
        "disable octoserve-main.service",
        "--no-block stop octoserve-main.service",
        f"enable {UNIT}",
        f"--no-block start {UNIT}",
    ]
    assert deployment.state(folder, 1) == "failed"


def test_after_a_power_cut_in_a_later_deploy_what_was_proven_starts(systemctl: Path, folder: Path) -> None:
    (folder / give_way.NAME).write_text(json.dumps({"unit": UNIT, "active": True, "enabled": True}))
    deployment.set_state(folder, 1, "passed")
    deployment.make_current(folder, 1)
    assert recover.go_back_by_hand(folder, "octoserve-main.service") == ""
    assert orders(systemctl) == []
