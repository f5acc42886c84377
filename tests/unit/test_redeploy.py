"""scripts/redeploy.py: what it makes of summaries and recaps, and its exit codes beside a stand-in for Ansible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redeploy

ROOT = Path(__file__).parents[2]
RECAP = "PLAY RECAP ****\n{host}   : ok=9    changed={changed}    unreachable=0    failed=0    skipped=1\n"


@pytest.mark.parametrize(
    ("summary", "code"),
    [
        ({"ok": True, "failed_phase": None, "rolled_back": False}, 0),
        ({"ok": False, "failed_phase": "preflight"}, 10),
        ({"ok": False, "failed_phase": "install"}, 11),
        ({"ok": False, "failed_phase": "start", "rolled_back": False}, 12),
        ({"ok": False, "failed_phase": "coherence"}, 13),
        ({"ok": False, "failed_phase": "throughput"}, 14),
        ({"ok": False, "failed_phase": "coherence", "rolled_back": True}, 15),
        ({"ok": False, "failed_phase": None}, 1),
        ({"ok": False, "failed_phase": "coherence", "coherence": {"ok": False, "total": 0}}, 1),
        ({"ok": False, "failed_phase": "coherence", "coherence": {"ok": False, "total": 15}}, 13),
        ({"ok": False, "failed_phase": "throughput", "throughput": {"ok": True}}, 1),
        ({"ok": False, "failed_phase": "throughput", "throughput": {"ok": False}}, 14),
        ({"ok": False, "failed_phase": "a new word"}, 1),
    ],
)
def test_a_summary_has_its_code(summary: dict[str, Any], code: int) -> None:
    assert redeploy.code_of(summary) == code


def test_changes_are_read_from_a_colored_recap() -> None:
    text = "PLAY RECAP\n\x1b[0;33mgpu8\x1b[0m : \x1b[0;32mok=5   \x1b[0m \x1b[0;33mchanged=2   \x1b[0m unreachable=0\n"
    assert redeploy.changes(text + "other                : ok=1    changed=0    unreachable=0\n") == {
        "gpu8": 2,
        "other": 0,
    }


class Stand:
    """A stand-in for ansible-playbook on PATH: a check run tells `changed`, a real one writes a summary and ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reports = folder, folder / "reports"
        self.page = folder / "page.md"

    def run(
        self,
        *options: str,
        changed: int,
        summary: dict[str, Any] | None,
        status: int,
        checked: int = 0,
        recap: str = "",
        **environment: str,
    ) -> Any:
        report = "gpu8/2026-11-30T10-00-00Z"
        answer = json.dumps(summary)
        program = f"""#!{sys.executable}
import os, pathlib, sys
if "--check" in sys.argv:
    print({RECAP.format(host="gpu8", changed=changed)!r})
    sys.exit({checked})
print({RECAP.format(host="gpu8", changed=changed) + recap!r})
if {summary!r} is not None:
    report = pathlib.Path(os.environ["OCTOSERVE_REPORTS"]) / {str(report)!r}
    report.mkdir(parents=True)
    (report / "summary.json").write_text({answer!r})
    (report / "summary.md").write_text("# gpu8\\n")
    (report.parent / "latest").symlink_to(report.name)
sys.exit({status})
"""
        (self.folder / "ansible-playbook").write_text(program)
        (self.folder / "ansible-playbook").chmod(0o755)
        where = {"OCTOSERVE_REPORTS": str(self.reports), "GITHUB_STEP_SUMMARY": str(self.page), **environment}
        where = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", **where}
        command = [sys.executable, str(ROOT / "scripts/redeploy.py"), "-i", "inventory/example", *options]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, env=where)


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


def test_nothing_is_done_where_nothing_changed(stand: Stand) -> None:
    done = stand.run(changed=0, summary={"ok": False, "failed_phase": "start"}, status=2)
    assert (done.returncode, "nothing to do (gpu8: 0 changes)" in done.stdout) == (0, True)
    assert not stand.reports.exists()


def test_a_change_is_deployed_and_told(stand: Stand) -> None:
    done = stand.run(changed=3, summary={"ok": True}, status=0)
    assert done.returncode == 0, done.stdout
    assert stand.page.read_text().startswith("# gpu8")


def test_a_failure_has_its_code(stand: Stand) -> None:
    done = stand.run(changed=3, summary={"failed_phase": "coherence", "rolled_back": True}, status=2)
    assert (done.returncode, "exit code 15, gpu8: 15" in done.stdout) == (15, True)


def test_always_asks_no_check_run(stand: Stand) -> None:
    assert stand.run("--always", changed=0, summary={"ok": True}, status=0, checked=2).returncode == 0


def test_check_deploys_nothing(stand: Stand) -> None:
    done = stand.run("--check", changed=3, summary={"ok": True}, status=0)
    assert (done.returncode, stand.reports.exists()) == (0, False)
    assert "would change (gpu8: 3 changes)" in done.stdout


def test_a_check_run_that_fails_is_a_failed_preflight(stand: Stand) -> None:
    assert stand.run(changed=3, summary={"ok": True}, status=0, checked=4).returncode == 10


def test_a_run_without_a_report_is_no_success(stand: Stand) -> None:
    done = stand.run("--always", changed=0, summary=None, status=0)
    assert (done.returncode, "no report was written" in done.stdout) == (1, True)


def test_an_ok_of_a_run_that_failed_is_none(stand: Stand) -> None:
    assert stand.run("--always", changed=0, summary={"ok": True}, status=2).returncode == 1


def test_a_host_without_a_report_is_not_forgotten(stand: Stand) -> None:
    done = stand.run("--always", changed=0, summary={"ok": True}, status=0, recap="gpu9 : ok=1 changed=1 unreachable=0")
    assert (done.returncode, "gpu8: 0, no report was written of gpu9" in done.stdout) == (1, True), done.stdout


def test_a_report_that_another_run_wrote_meanwhile_is_not_this_one_s(stand: Stand) -> None:
    theirs = stand.reports / "gpu9/2026-11-30T10-00-00Z"
    theirs.mkdir(parents=True)
    (theirs / "summary.json").write_text('{"ok": false, "failed_phase": "start"}')
    (theirs / "summary.md").write_text("# gpu9\n")
    (theirs.parent / "latest").symlink_to(theirs.name)
    os.utime(theirs / "summary.json", (2e9, 2e9))
    done = stand.run("--always", changed=0, summary={"ok": True}, status=0)
    assert (done.returncode, "gpu9" in done.stdout) == (0, False), done.stdout


def test_reports_are_found_where_the_run_wrote_them(stand: Stand) -> None:
    """Relative to where it was started, not to the repository, from which Ansible runs."""
    done = stand.run("--always", changed=0, summary={"ok": True}, status=0, OCTOSERVE_REPORTS="mine")
    assert done.returncode == 0, done.stdout
    assert (stand.folder / "mine/gpu8/latest/summary.json").exists()


def test_reports_may_be_named_in_the_configuration(stand: Stand) -> None:
    (stand.folder / "ansible.cfg").write_text("[evidence]\nreports = theirs ; as the callback reads it\n")
    config = str(stand.folder / "ansible.cfg")
    done = stand.run("--always", changed=0, summary={"ok": True}, status=0, OCTOSERVE_REPORTS="", ANSIBLE_CONFIG=config)
    assert done.returncode == 0, done.stdout
    assert (stand.folder / "theirs/gpu8/latest/summary.json").exists()


def test_reports_lie_in_the_repository_otherwise() -> None:
    assert redeploy.reports_folder({}) == ROOT / "reports"
