"""The workflow for a self-hosted runner: no code of a fork runs there, and a pull request only checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/redeploy.yml").read_text())
    return found


def test_forks_do_not_run_on_the_runner(workflow: dict[str, Any]) -> None:
    assert "pull_request_target" not in workflow["on"], "it would run with the secrets"
    for job in workflow["jobs"].values():
        assert "self-hosted" in job["runs-on"]
        assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]
        assert "github.event_name != 'pull_request'" in job["if"]


def test_it_may_only_read_and_is_never_cut_short(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is False
    model = yaml.safe_load((ROOT / "roles/gguf_model/defaults/main.yml").read_text())
    longest_s = 2 * model["gguf_model_timeout"]  # the fetch, and the merge
    assert workflow["jobs"]["redeploy"]["timeout-minutes"] * 60 > longest_s


def test_a_pull_request_only_checks_and_the_code_is_the_scripts_own(workflow: dict[str, Any]) -> None:
    steps = workflow["jobs"]["redeploy"]["steps"]
    deploys = [step["run"] for step in steps if "scripts/redeploy.py" in step.get("run", "")]
    assert len(deploys) == 1
    assert "${{ github.event_name == 'pull_request' && '--check' || '' }}" in deploys[0]
    assert deploys[0].rstrip().splitlines()[-1].lstrip().startswith("scripts/redeploy.py"), "nothing after it"


def test_secrets_reach_files_of_the_runner_only(workflow: dict[str, Any]) -> None:
    steps = workflow["jobs"]["redeploy"]["steps"]
    assert [step["name"] for step in steps if "secrets." in str(step)] == ["Key and vault"]
    assert "rm -f" in steps[-1]["run"]
    assert steps[-1]["if"] == "always()"
