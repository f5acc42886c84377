"""What serves where a way back by hand, or what surrounds the gates, fails; the role that starts is a stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import local_play
import pytest
from octoserve import deployment, patches
from octoserve.receipt import Receipt

GATES = {"profile": "tiny", "stack": "engine-1", "settings": {"suites": []}}
ROLES = {
    "vllm_service/tasks/restore.yml": """
- name: Choose
  deployment: {path: "{{ folder }}", state: chosen, number: "{{ vllm_service_deployment | default(omit, true) }}"}
  register: _chosen
- name: Start
  ansible.builtin.fail: {msg: "deployment {{ _chosen.number }} does not come back: no memory"}
  when: _chosen.number in broken | default([])
- name: Tell
  ansible.builtin.set_fact:
    vllm_service_restored: "{{ _chosen.content | combine({'number': _chosen.number, 'by_hand': ''}) }}"
- name: Facts
  ansible.builtin.import_tasks: facts.yml
""",
    "vllm_service/tasks/facts.yml": """
- name: Look
  deployment: {path: "{{ folder }}", state: running}
  register: _found
- name: Tell
  ansible.builtin.set_fact:
    vllm_service_running: {base_url: "", unit: "", deployment: "{{ _found.number }}", deployments: "{{ folder }}"}
""",
    "host/tasks/library.yml": """
- name: Copy the library
  ansible.builtin.fail: {msg: No space left on device}
  when: full | default(false)
""",
    "gates/tasks/main.yml": "- name: Ask\n  ansible.builtin.debug: {msg: they hold}\n",
    "gates/tasks/metrics.yml": "- name: Metrics\n  ansible.builtin.debug: {msg: written}\n",
}
LOCK = """#!/usr/bin/python
# WANT_JSON
import json, sys
path = json.load(open(sys.argv[1]))["path"]
locked = {"failed": True, "msg": "this host is locked by ann"}
print(json.dumps(locked if "/lost/" in path else {"changed": False}))
"""


class Hosts:
    """Hosts with two deployments of one release; `states` are theirs, and the last that passed is current."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in ROLES.items():
            (folder / "roles" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "roles" / name).write_text(text)
        (folder / "library").mkdir()
        (folder / "library/host_lock.py").write_text(LOCK)

    def add(self, host: str, *states: str) -> None:
        home, models = self.folder / host / "home", self.folder / host / "models"
        for number, state in enumerate(states, 1):
            release = home / f"releases/engine-{number}"
            patched = release / "lib/python3.11/site-packages/engine/core.py"
            patched.parent.mkdir(parents=True)
            patched.write_text("patched\n")
            record = {"files": {"engine/core.py": patches.sha256("patched\n")}}
            (release / "release.json").write_text(json.dumps(record))
            models.mkdir(exist_ok=True)
            (models / "m.gguf").write_bytes(b"GGUF")
            Receipt(models).record("m.gguf", "0" * 64)
            files = {"folder": str(models), "sha256": {"m.gguf": "0" * 64}}
            content = {"release": release.name, "model_files": files, "gates": GATES}
            assert deployment.record(self.deployments(host), content) == number
            deployment.set_state(self.deployments(host), number, state)
            if state == "passed":
                deployment.make_current(self.deployments(host), number)

    def deployments(self, host: str) -> Path:
        return self.folder / host / "state/deployments/main"

    def stands(self, host: str) -> dict[str, Any]:
        """What runs, what is current, and how far each came."""
        folder = self.deployments(host)
        states = [deployment.state(folder, number) for number in deployment.numbers(folder)]
        return {"runs": deployment.running(folder), "current": deployment.current(folder), "states": states}

    def play(self, playbook: str, hosts: dict[str, dict[str, Any]]) -> local_play.Played:
        here = self.folder / "{{ inventory_hostname }}"
        profile = {"name": "tiny", "stack": {"name": "engine-1"}, "serve": {"start_timeout_s": 5}, "gates": {}}
        octoserve = {
            **{"home": str(here / "home"), "state_dir": str(here / "state"), "models_dir": str(here / "models")},
            **{"instance": "main", "host": "127.0.0.1", "port": 8000, "lock_timeout": 1, "keep_deployments": 3},
            **{"config_dir": "", "adopt_unit": "", "api_key": "", "suites_dir": "", "extra_suites": []},
            **{"textfile_dir": "", "profile": profile},
        }
        folder = str(here / "state/deployments/main")
        return local_play.run(
            self.folder,
            str(local_play.ROOT / "playbooks" / playbook),
            variables={"octoserve": octoserve, "folder": folder, "gates_of_profile": GATES},
            hosts=hosts,
        )


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_a_way_back_by_hand(hosts: Hosts) -> None:
    for host in ("good", "edited", "broken"):
        hosts.add(host, "passed", "passed")
    edit = hosts.folder / "edited/home/releases/engine-1/lib/python3.11/site-packages/engine/core.py"
    edit.write_text("edited\n")
    played = hosts.play("rollback.yml", {"good": {}, "edited": {}, "broken": {"broken": [1]}})

    assert hosts.stands("good") == {"runs": 1, "current": 1, "states": ["passed", "retired"]}, played.output
    assert played.failed["good"] == 0

    assert hosts.stands("edited") == {"runs": 2, "current": 2, "states": ["passed", "passed"]}, played.output
    assert "deployment 1 is not as it was recorded" in played.failure("edited")
    assert "edited" not in played.hosts_of("Choose"), "nothing is stopped"

    assert hosts.stands("broken") == {"runs": 2, "current": 2, "states": ["passed", "passed"]}, played.output
    message = played.failure("broken")
    assert "deployment 1 does not come back: no memory" in message
    assert "Deployment 2, which served before, is back, and its gates passed." in message


def test_what_fails_before_the_gates_of_a_deploy(hosts: Hosts) -> None:
    for host in ("full", "lost", "own"):
        hosts.add(host, "passed", "recorded")
    deployed = {"octoserve_deployed": 2}
    played = hosts.play("gates.yml", {"full": {**deployed, "full": True}, "lost": deployed, "own": {"full": True}})
    assert set(played.failed.values()) == {1}, played.output

    assert hosts.stands("full") == {"runs": 1, "current": 1, "states": ["passed", "failed"]}
    message = played.failure("full")
    assert "No space left on device Deployment 2 failed. Deployment 1, which served before, is back" in message

    # Another run has the host: what it may have done there is left alone.
    assert hosts.stands("lost") == {"runs": 2, "current": 1, "states": ["passed", "recorded"]}
    message = played.failure("lost")
    assert "locked by ann. Deployment 2, which this run started, was left as it was" in message

    assert hosts.stands("own") == {"runs": 2, "current": 1, "states": ["passed", "recorded"]}, "it deployed nothing"
