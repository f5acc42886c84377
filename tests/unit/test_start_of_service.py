"""roles/vllm_service starts the unit, or says what its journal says of the start that was refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import local_play
import pytest

EDITED = "octoserve.guard_deployment: /opt/r/core.py:12: edited"
SYSTEMCTL = """#!/bin/sh
case "$*" in
    *show*) printf 'LoadState=loaded\\nActiveState=failed\\nSubState=failed\\nInvocationID=0123\\n' ;;
    *restart*|*start*) echo "Job failed. See systemctl status." >&2; exit 1 ;;
esac
"""
VARIABLES = {
    "_vllm_service_content": {"base_url": "http://127.0.0.1:9", "model_name": "m"},
    "_vllm_service_helpers": {"changed": False},
    "_vllm_service_unit_file": {"changed": False},
}
PLAY = {
    "hosts": "octoserve",
    "tasks": [
        {
            "name": "Write what changed",
            "ansible.builtin.command": "true",
            "changed_when": "written",
            "notify": "Restart the service",
        },
        {"name": "Start", "ansible.builtin.import_role": {"name": "vllm_service", "tasks_from": "start"}},
    ],
}


def test_a_start_that_a_guard_refused_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {
        "bin/systemctl": SYSTEMCTL,
        "bin/journalctl": f"#!/bin/sh\necho '{EDITED}'\n",
        "home/tools/bin/python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "play.yml").write_text(json.dumps([PLAY]))
    played = local_play.run(
        tmp_path,
        "play.yml",
        variables={**VARIABLES, "vllm_service_home": str(tmp_path / "home")},
        hosts={"changed": {"written": True}, "stopped": {"written": False}},
    )
    for host in ("changed", "stopped"):
        assert played.failed[host] == 1, played.output
        assert f"octoserve-main.service did not start: {EDITED}. All of it" in played.failure(host), played.output
    assert played.hosts_of("Restart the service") == {"changed"}
