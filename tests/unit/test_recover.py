"""A boot starts what was proven: an unproven deployment makes way, and the key stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from octoserve import deployment, recover, unit_file

OLD: dict[str, Any] = {"unit": "[Service]\n# old\n", "environment": {"HOME": "/var/cache/old", "ZONE": 1}}
NEW: dict[str, Any] = {"unit": "[Service]\n# new\n", "environment": {"HOME": "/var/cache/new"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One deployment that passed and one that was recorded after it."""
    made = tmp_path / "main"
    for content in (OLD, NEW):
        deployment.record(made, content)
    deployment.set_state(made, 1, "passed")
    deployment.make_current(made, 1)
    return made


def test_the_unproven_one_makes_way_and_the_key_stays(folder: Path, tmp_path: Path) -> None:
    unit, environment = tmp_path / "a.service", tmp_path / "main.env"
    unit.write_text(NEW["unit"])
    environment.write_text(unit_file.environment({**NEW["environment"], "VLLM_API_KEY": "a $key"}))
    assert recover.unproven(folder) == 2
    assert recover.wanted(folder, unit) == 1
    recover.recover(folder, 1, unit, environment)
    assert unit.read_text() == OLD["unit"]
    assert environment.read_text() == unit_file.environment({**OLD["environment"], "VLLM_API_KEY": "a $key"})
    assert environment.stat().st_mode & 0o777 == 0o600
    assert (deployment.running(folder), deployment.state(folder, 2)) == (1, "failed")
    assert recover.wanted(folder, unit) is None, "once is enough"


def test_a_way_back_to_one_that_had_failed_is_recovered_once(folder: Path, tmp_path: Path) -> None:
    unit, environment = tmp_path / "a.service", tmp_path / "main.env"
    deployment.set_state(folder, 2, "passed")
    deployment.make_current(folder, 2)
    for number, state in ((1, "recorded"), (2, "retired")):  # rollback.yml to 1, then the power was cut
        deployment.set_state(folder, number, state)
    unit.write_text(OLD["unit"])
    assert recover.wanted(folder, unit) == 2
    recover.recover(folder, 2, unit, environment)
    assert (deployment.running(folder), deployment.state(folder, 1)) == (2, "failed")
    assert recover.wanted(folder, unit) is None


def test_a_way_back_that_was_cut_before_its_unit_goes_on(folder: Path, tmp_path: Path) -> None:
    unit = tmp_path / "a.service"
    deployment.set_state(folder, 2, "retired")
    unit.write_text(NEW["unit"])
    assert recover.wanted(folder, unit) == 1
    unit.write_text(OLD["unit"])
    assert recover.wanted(folder, unit) is None


def test_a_boot_with_nothing_to_recover_changes_nothing(folder: Path, tmp_path: Path) -> None:
    deployment.set_state(folder, 2, "failed")
    assert recover.unproven(folder) is None, "the current one runs"
    deployment.set_state(folder, 2, "passed")
    assert recover.unproven(folder) is None, "its gates passed; only the link was not written yet"
    assert recover.unproven(tmp_path / "none") is None
    assert recover.main([str(folder), f"--unit-file={tmp_path / 'u'}", f"--environment-file={tmp_path / 'e'}"]) == 0
    assert not (tmp_path / "u").exists()


def test_a_first_deployment_has_none_to_make_way_for(tmp_path: Path) -> None:
    deployment.record(tmp_path, NEW)
    assert recover.unproven(tmp_path) is None
