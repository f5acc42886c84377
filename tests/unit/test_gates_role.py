"""The role `gates` with gates that always hold: what it demands beside them, of the service and of the suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up_results import case, coherence, throughput

ROOT = Path(__file__).parents[2]
# Answers as the module of this name would, where all is well.
GATE = """#!/usr/bin/python
# WANT_JSON
import json, sys
answer, asked = json.loads({answer!r}), json.load(open(sys.argv[1]))
answer["msg"] += f" ({{asked.get('concurrency')}} at once, {{asked['timeout']}} s)"
print(json.dumps(answer))
"""
ANSWERS = {"coherence_gate": coherence(case("capital-of-france")), "throughput_gate": throughput()}
# The service is another one, or has another state, from the given look on.
SYSTEMCTL = """#!/bin/sh
echo >> {count}
[ "$(wc -l < {count})" -lt {look} ] && set -- first active running || set -- {then}
echo "InvocationID=$1
ActiveState=$2
SubState=$3"
"""
RESTARTED = "second active running"
# host -> the look at which the service is no more what it was, what it is then, and the suite.
SOUND = "name: mine\ncases: [{name: paris, prompt: 'Capital of France?', expect: {accept: [Paris]}}]\n"
HOSTS = {
    "steady": (9, RESTARTED, SOUND),
    "asked": (2, RESTARTED, SOUND),
    "measured": (3, RESTARTED, SOUND),
    "failed": (3, "first failed failed", SOUND),
    "waiting": (2, "first activating auto-restart", SOUND),
    "dead": (1, "first failed failed", SOUND),
    "stopped": (1, "'' inactive dead", SOUND),
    "garbled": (
        9,
        RESTARTED,
        "name: mine\ncases:\n  - name: secret\n    private: true\n    prompt: Halcyon: what is it?\n",
    ),
    "listed": (9, RESTARTED, "- name: paris\n  prompt: Capital of France?\n"),
}
PLAYBOOK = """
- name: Gates
  hosts: all
  gather_facts: false
  vars: {octoserve_phase: gates}
  environment: {PATH: "{{ stubs }}:/usr/bin:/bin"}
  roles: [gates]
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of a run, and what Ansible printed of each host."""
    folder = tmp_path_factory.mktemp("gates")
    hosts: dict[str, dict[str, Any]] = {}
    (folder / "library").mkdir()
    for module, answer in ANSWERS.items():
        text = json.dumps({**answer, "changed": False, "msg": f"{module}: holds"})
        (folder / f"library/{module}.py").write_text(GATE.format(answer=text))
    for host, (look, then, suite) in HOSTS.items():
        stubs = folder / host
        stubs.mkdir()
        (stubs / "systemctl").write_text(SYSTEMCTL.format(count=stubs / "looks", look=look, then=then))
        (stubs / "systemctl").chmod(0o755)
        (stubs / "suite.yml").write_text(suite)
        hosts[host] = {"stubs": str(stubs), "gates_suites": [str(stubs / "suite.yml")]}
    hosts["measured"].update(gates_max_num_seqs=8, gates_coherence_timeout=100, gates_throughput_timeout=200)
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "gates_python": sys.executable,
        "gates_textfile_dir": "{{ stubs }}/metrics",
        "gates_profile": "tiny",
        "gates_stack": "engine-1",
        "gates_unit": "octoserve-main.service",
        "gates_floor_tok_s": 50,
    }
    (folder / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts, "vars": variables}}))
    (folder / "play.yml").write_text(PLAYBOOK)
    (folder / "ansible.cfg").write_text(
        f"[defaults]\nroles_path = {ROOT}/roles\nlibrary = {folder}/library:{ROOT}/library\n"
        f"module_utils = {ROOT}/module_utils\naction_plugins = {ROOT}/action_plugins\n"
        f"filter_plugins = {ROOT}/filter_plugins\nnocolor = true\nstdout_callback = oneline\n"
        f"callback_plugins = {ROOT}/callback_plugins\ncallbacks_enabled = evidence\n"
        f"[evidence]\nreports = {folder}/reports\n"
    )
    environment = {**os.environ, "ANSIBLE_CONFIG": "ansible.cfg", "ANSIBLE_HOME": str(folder / "ansible")}
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "hosts.yml", "play.yml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return folder, {host: "\n".join(line for line in lines if line.startswith(host)) for host in HOSTS}


def gates_ok(folder: Path, host: str) -> str:
    """What node_exporter is told."""
    text = (folder / host / "metrics/octoserve_main.prom").read_text()
    return next(line for line in text.splitlines() if line.startswith("octoserve_gates_ok")).split()[-1]


def test_a_service_that_runs_on_is_asked_and_measured(said: tuple[Path, dict[str, str]]) -> None:
    folder, output = said
    assert "coherence_gate: holds" in output["steady"]
    assert "throughput_gate: holds" in output["steady"]
    assert "FAILED" not in output["steady"], output["steady"]
    assert gates_ok(folder, "steady") == "1.0"


def test_as_many_cases_are_asked_at_once_as_are_served_at_most_16(said: tuple[Path, dict[str, str]]) -> None:
    _, output = said
    assert "coherence_gate: holds (16 at once" in output["steady"], "not known how many are served"
    assert "coherence_gate: holds (8 at once" in output["measured"]


def test_the_time_of_each_gate_is_bounded(said: tuple[Path, dict[str, str]]) -> None:
    _, output = said
    for host, asked, measured in (("steady", 7200, 3600), ("measured", 100, 200)):
        assert f"at once, {asked} s)" in output[host]
        assert f"throughput_gate: holds (None at once, {measured} s)" in output[host]


@pytest.mark.parametrize(("host", "measured"), [("asked", False), ("measured", True)])
def test_a_service_that_was_started_again_is_another_one(
    said: tuple[Path, dict[str, str]], host: str, measured: bool
) -> None:
    folder, output = said
    assert "coherence_gate: holds" in output[host]
    assert ("throughput_gate: holds" in output[host]) is measured
    assert f"could not run: octoserve-main.service was started again while it was {host}: found" in output[host]
    assert "found invocation second, active (running), wanted first, active (running)" in output[host]
    assert gates_ok(folder, host) == "0.0"
    summary = json.loads((folder / f"reports/{host}/latest/summary.json").read_text())
    assert (summary["ok"], summary["failed_phase"]) == (False, "coherence")
    assert (summary["coherence"]["ok"], summary["coherence"]["passed"]) == (False, 0)
    assert (summary["throughput"]["ok"], summary["throughput"]["decode_tok_s"]) == (False, None)
    assert summary["throughput"]["verdict"] == ("could-not-run" if measured else "did-not-run")
    told = (folder / f"reports/{host}/latest/metrics.prom").read_text()
    for metric in ("gates", "coherence", "throughput"):
        assert f'octoserve_{metric}_ok{{service="main"}} 0.0' in told
    page = (folder / f"reports/{host}/latest/report.html").read_text()
    assert "The gates could not run" in page
    assert "was started again" in page
    assert "of 1 case passed" not in page
    report = (folder / f"reports/{host}/latest/summary.md").read_text()
    assert "The gates could not run" in report
    assert "Coherence: no verdict" in report
    assert ("Throughput: could not run" in report) is measured
    assert "was started again" in report


@pytest.mark.parametrize(
    ("host", "while_", "state"),
    [("failed", "measured", "failed (failed)"), ("waiting", "asked", "activating (auto-restart)")],
)
def test_a_service_that_ended_keeps_its_invocation_and_is_another_one(
    said: tuple[Path, dict[str, str]], host: str, while_: str, state: str
) -> None:
    folder, output = said
    assert "coherence_gate: holds" in output[host]
    assert f"could not run: octoserve-main.service ended while it was {while_}: found" in output[host]
    assert f"found invocation first, {state}, wanted first, active (running)" in output[host]
    assert gates_ok(folder, host) == "0.0"


@pytest.mark.parametrize(("host", "state"), [("dead", "failed (failed)"), ("stopped", "inactive (dead)")])
def test_a_service_that_does_not_run_is_not_asked(said: tuple[Path, dict[str, str]], host: str, state: str) -> None:
    folder, output = said
    assert f"octoserve-main.service is not running on {host}: found {state}, wanted active (running)" in output[host]
    assert "holds" not in output[host]
    assert gates_ok(folder, host) == "0.0"


@pytest.mark.parametrize(
    ("host", "mistake"),
    [("garbled", "no YAML: line 5, column 20: mapping values are not allowed"), ("listed", "found a list")],
)
def test_a_mistake_in_a_suite_names_its_file(said: tuple[Path, dict[str, str]], host: str, mistake: str) -> None:
    folder, output = said
    assert f"{folder / host / 'suite.yml'}: {mistake}" in output[host], output[host]
    assert "Halcyon" not in output[host]
    assert "holds" not in output[host]
