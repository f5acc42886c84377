"""What starts is what was deployed: patched files and the model's files as recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from module_runner import Runner
from octoserve import deployment, guard_deployment, patches
from octoserve.receipt import Receipt

DIGEST = "a" * 64
UNIT = "--unit=octoserve-main.service"


class Host:
    """A release with a patched file, a model with a receipt, and a deployment of both."""

    def __init__(self, folder: Path) -> None:
        self.deployments, self.releases, self.models = folder / "main", folder / "releases", folder / "models"
        site = self.releases / "engine-1/lib/python3.11/site-packages"
        self.patched = site / "engine/core.py"
        self.patched.parent.mkdir(parents=True)
        self.patched.write_text("patched\n")
        record = {"files": {"engine/core.py": patches.sha256("patched\n"), "engine/gone.py": None}}
        (self.releases / "engine-1/release.json").write_text(json.dumps(record))
        self.models.mkdir()
        self.model = self.models / "m.gguf"
        self.model.write_bytes(b"GGUF")
        Receipt(self.models).record("m.gguf", DIGEST)
        files = {"folder": str(self.models), "sha256": {"m.gguf": DIGEST}}
        self.content = {"release": "engine-1", "model_files": files}
        deployment.record(self.deployments, self.content)

    def faults(self) -> list[str]:
        return list(guard_deployment.faults(self.deployments, self.releases))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def test_a_deployment_as_recorded_may_start(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert guard_deployment.main([str(host.deployments), f"--releases={host.releases}", UNIT]) == 0
    assert "as recorded" in capsys.readouterr().out


def test_an_edit_is_named(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.patched.write_text("patched\n# edited\n")
    assert guard_deployment.main([str(host.deployments), f"--releases={host.releases}", UNIT]) == 1
    assert str(host.patched) in capsys.readouterr().err


def test_a_file_that_a_patch_removed_must_stay_away(host: Host) -> None:
    host.patched.with_name("gone.py").write_text("back\n")
    assert ["engine/gone.py" in fault for fault in host.faults()] == [True]


def test_an_incomplete_release_is_named(host: Host) -> None:
    (host.releases / "engine-1/release.json").unlink()
    assert ["is not complete" in fault for fault in host.faults()] == [True]


def test_another_file_of_the_same_size_is_named(host: Host) -> None:
    about = host.model.stat()
    host.model.unlink()
    host.model.write_bytes(b"XXXX")
    os.utime(host.model, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert [fault for fault in host.faults() if "m.gguf changed since it was verified" in fault]


def test_a_missing_file_is_named(host: Host) -> None:
    host.model.unlink()
    assert [fault for fault in host.faults() if "m.gguf is not there" in fault]


def test_a_file_that_was_verified_anew_as_another_is_named(host: Host) -> None:
    Receipt(host.models).record("m.gguf", "b" * 64)
    assert host.faults()


def test_a_record_of_the_first_versions_has_no_model_files(host: Host) -> None:
    deployment.record(host.deployments, {"release": "engine-1"})
    host.model.unlink()
    assert host.faults() == []


def test_a_unit_is_held_to_its_own_deployment(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the model of a newer deployment is checked, the one that serves may crash and start again."""
    monkeypatch.setattr(deployment, "UNITS", tmp_path)
    unit = tmp_path / "octoserve-main.service"
    for release in ("engine-1", "engine-2"):
        deployment.record(host.deployments, {**host.content, "release": release, "unit": f"ExecStart={release}"})
    command = [str(host.deployments), f"--releases={host.releases}", UNIT]
    unit.write_text("ExecStart=engine-1")
    assert guard_deployment.main(command) == 0
    unit.write_text("ExecStart=engine-2")
    assert guard_deployment.main(command) == 1
    assert "engine-2 is not complete" in capsys.readouterr().err
    assert guard_deployment.main(command[:2]) == 1, "a unit of the first versions: the newest in service"


def test_one_that_does_not_run_can_be_looked_at(host: Host, run: Runner) -> None:
    """Before a way back to it stops what runs."""
    deployment.record(host.deployments, {"release": "engine-2"})
    options = {"path": str(host.deployments), "state": "verified", "releases": str(host.releases)}
    assert not run.changed("deployment", number=1, **options)
    host.patched.write_text("edited\n")
    message = run.error("deployment", number=1, **options)
    assert message.startswith("deployment 1 is not as it was recorded: ")
    assert str(host.patched) in message
    assert "engine-2 is not complete" in run.error("deployment", number=2, **options)
    assert "0009/deployment.json" in run.error("deployment", number=9, **options)


def test_without_a_deployment_nothing_may_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guard_deployment.main([str(tmp_path / "main"), f"--releases={tmp_path}", UNIT]) == 1
    assert "no deployment" in capsys.readouterr().err
