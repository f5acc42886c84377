"""The evidence of a run: its files, and a real ansible-playbook whose hosts pass, fail and are unreachable."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_systemd
import made_up_results as made_up
import pytest
from fake_openai_server import COUNT, FakeOpenAiServer, Reply
from made_up_results import case, coherence, task, throughput
from made_up_results import run as a_run
from octoserve import evidence
from octoserve.evidence import Task
from octoserve.report import words

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "templates/report.html.j2"
FILES = [
    "junit.xml",
    "metrics.prom",
    "raw/coherence.json",
    "raw/tasks.jsonl",
    "raw/throughput.json",
    "report.html",
    "summary.json",
    "summary.md",
]
SUMMARY_KEYS = [
    "ok",
    "host",
    "stack",
    "profile",
    "instance",
    "inventory",
    "deployment",
    "failed_phase",
    "rolled_back",
    "restored",
    "phases",
    "coherence",
    "throughput",
]


Finished = tuple[Task, dict[str, Any]]
PREFLIGHT = (task("preflight", "set_fact"), {"ansible_facts": {"octoserve_evidence": made_up.TOLD}})
SERVICE = (task("service", status="changed"), {"changed": True})
COHERENT = (task("gates", "coherence_gate"), coherence(case("capital")))
FAST = (task("gates", "throughput_gate", "changed"), throughput())


def test_summary_of_a_passed_run() -> None:
    found = evidence.summarize(a_run(PREFLIGHT, SERVICE, COHERENT, FAST))
    assert list(found) == SUMMARY_KEYS
    assert found["ok"] is True
    assert {key: found[key] for key in made_up.TOLD} == made_up.TOLD
    assert (found["failed_phase"], found["rolled_back"]) == (None, False)
    assert found["phases"] == [
        {"name": "preflight", "seconds": 1.0, "changed": 0},
        {"name": "service", "seconds": 1.0, "changed": 1},
        {"name": "gates", "seconds": 2.0, "changed": 1},
    ]
    assert (found["coherence"]["passed"], found["coherence"]["total"]) == (1, 1)
    assert found["throughput"]["decode_tok_s"] == {"mean": 56.9, "stdev": 0.3, "ci95": [56.5, 57.3], "n": 5}
    assert len(found["throughput"]["points"]) == 8
    assert "history" not in found["throughput"]["baseline"]
    assert "trials" not in found["throughput"]
    assert found["throughput"]["verdict"] == "pass"


@pytest.mark.parametrize("left_out", [COHERENT, FAST])
def test_a_gate_that_did_not_run_is_no_pass(left_out: Any) -> None:
    found = evidence.summarize(a_run(*(one for one in (PREFLIGHT, COHERENT, FAST) if one is not left_out)))
    assert (found["ok"], found["failed_phase"]) == (False, None)


def test_a_gate_in_check_mode_did_not_run() -> None:
    skipped = (task("gates", "coherence_gate", "skipped"), {**COHERENT[1], "skipped": True})
    assert evidence.summarize(a_run(skipped, FAST))["coherence"]["total"] == 0


@pytest.mark.parametrize(
    ("phase", "name"),
    [("preflight", "preflight"), ("release", "install"), ("model", "install"), ("service", "start")],
)
def test_a_failed_phase_has_the_name_of_its_exit_code(phase: str, name: str) -> None:
    found = evidence.summarize(a_run(PREFLIGHT, (task(phase, status="failed"), {}), failed=True))
    assert (found["ok"], found["failed_phase"]) == (False, name)


def test_the_gates_are_told_apart() -> None:
    broke: Finished = (task("gates", "assert", "failed"), {})
    wrong = (task("gates", "coherence_gate"), coherence(case("capital", "fail")))
    assert evidence.summarize(a_run(wrong, broke, failed=True))["failed_phase"] == "coherence"
    assert evidence.summarize(a_run(broke, failed=True))["failed_phase"] == "coherence"
    slow = (task("gates", "throughput_gate"), throughput("fail"))
    assert evidence.summarize(a_run(COHERENT, slow, broke, failed=True))["failed_phase"] == "throughput"
    assert evidence.summarize(a_run(COHERENT, broke, failed=True))["failed_phase"] == "throughput"


def test_a_rescued_failure_is_none_and_the_first_of_the_last_phase_is_the_cause() -> None:
    rescued: Finished = (task("release", status="failed"), {})
    assert evidence.summarize(a_run(rescued, COHERENT, FAST))["ok"] is True
    first: Finished = (task("service", status="failed", message="first"), {})
    last: Finished = (task("service", "fail", status="failed", message="last"), {})
    run = a_run(rescued, first, last, failed=True)
    assert run.failed_phase == "start"
    assert run.cause is not None
    assert run.cause.message == "first"


def test_a_rollback_is_no_pass_and_a_gate_stays_failed() -> None:
    wrong = (task("gates", "coherence_gate"), coherence(case("capital", "fail")))
    broke: Finished = (task("gates", "assert", "failed"), {})
    begun, back = (
        (task("gates", "set_fact"), {"ansible_facts": {"octoserve_evidence": told}})
        for told in ({"restored": {"deployment": 3}}, {"rolled_back": True})
    )
    found = evidence.summarize(a_run(PREFLIGHT, wrong, broke, begun, COHERENT, FAST, back))
    assert (found["ok"], found["rolled_back"], found["failed_phase"]) == (False, True, "coherence")
    assert found["coherence"]["passed"] == 0
    assert found["restored"] == {"deployment": 3, "coherence": True, "throughput": True}
    assert evidence.summarize(a_run(COHERENT, FAST, back))["ok"] is False
    # What is told of a phase afterwards speaks of the deployment that was to come back.
    late = (task("gates", "set_fact"), {"ansible_facts": {"octoserve_evidence": {"failed_phase": "coherence"}}})
    slow = (task("gates", "throughput_gate"), throughput("fail"))
    assert evidence.summarize(a_run(COHERENT, slow, broke, begun, late, back))["failed_phase"] == "throughput"
    assert evidence.summarize(a_run(COHERENT, FAST, late, broke, failed=True))["failed_phase"] == "coherence"


def test_after_a_restart_neither_gate_holds() -> None:
    broke: Finished = (task("gates", "assert", "failed", "could not run"), {})
    told = {"failed_phase": "coherence", "restarted": True}
    restarted = (task("gates", "set_fact"), {"ansible_facts": {"gates_evidence": told}})
    found = evidence.summarize(a_run(COHERENT, FAST, restarted, broke, COHERENT, failed=True))
    assert (found["coherence"]["ok"], found["throughput"]["ok"]) == (False, False)
    assert (found["throughput"]["verdict"], found["failed_phase"]) == ("could-not-run", "coherence")
    begun = (task("gates", "set_fact"), {"ansible_facts": {"octoserve_evidence": {"restored": {"deployment": 3}}}})
    wrong = (task("gates", "coherence_gate"), coherence(case("capital", "fail")))
    found = evidence.summarize(a_run(wrong, broke, begun, COHERENT, FAST, restarted, broke, failed=True))
    assert found["restored"] == {"deployment": 3, "coherence": False, "throughput": False}
    assert found["coherence"]["total"] == 1, "what made the run fail stays"


@pytest.mark.parametrize(
    ("number", "gates", "back", "said"),
    [
        (None, (), False, "Nothing served before it, so the service is stopped."),
        (3, (), False, "Deployment 3, which served before, did not come back."),
        (3, (COHERENT,), False, "Deployment 3, which served before, is back, but does not pass its gates now."),
        (3, (COHERENT, FAST), True, "Deployment 3, which served before, is back, and its gates passed."),
    ],
)
def test_the_verdict_says_what_serves_after_a_failure(
    number: int | None, gates: tuple[Finished, ...], back: bool, said: str
) -> None:
    wrong = (task("gates", "coherence_gate"), coherence(case("capital", "fail")))
    broke: Finished = (task("gates", "assert", "failed"), {})
    told = {"restored": {"deployment": number}}
    begun: Finished = (task("gates", "set_fact"), {"ansible_facts": {"octoserve_evidence": told}})
    ended: Finished = (task("gates", "set_fact"), {"ansible_facts": {"octoserve_evidence": {"rolled_back": back}}})
    summary = evidence.summarize(a_run(wrong, broke, begun, *gates, ended, failed=True))
    found = words.verdict(summary, None)
    assert found.sentence.endswith(said)
    assert ("rolled back" in found.headline) is back


@pytest.mark.parametrize(
    "result",
    [
        {**COHERENT[1], "failed": True},
        {**COHERENT[1], "passed": 0},
        {**COHERENT[1], "cases": [], "passed": 0, "total": 0},
    ],
)
def test_a_gate_that_contradicts_itself_is_no_pass(result: dict[str, Any]) -> None:
    found = evidence.summarize(a_run((COHERENT[0], result), FAST))
    assert (found["ok"], found["coherence"]["ok"]) == (False, False)


def test_a_gate_whose_job_was_lost_gave_no_verdict() -> None:
    lost = {"failed": True, "msg": "the job died", "finished": True, "progress": {"text": "12 of 40"}}
    broke = task("gates", "coherence_gate", "failed", "the job died")
    found = evidence.summarize(a_run(PREFLIGHT, (broke, lost), failed=True))
    assert (found["ok"], found["failed_phase"], found["coherence"]["total"]) == (False, "coherence", 0)


@pytest.mark.parametrize("starts", [0, 1, 4])
def test_a_report_is_whole_and_latest_points_at_it(tmp_path: Path, starts: int) -> None:
    mixed = coherence(case("a"), case("b", "fail", answer="<script>\ud800"), case("c", "could-not-run"))
    run = a_run(PREFLIGHT, SERVICE, (task("gates", "coherence_gate"), mixed), (FAST[0], throughput("fail", starts)))
    first = evidence.write(run, tmp_path, TEMPLATE)
    second = evidence.write(run, tmp_path, TEMPLATE)
    assert (first.name, second.name) == ("2026-11-30T01-02-03Z", "2026-11-30T01-02-03Z-2")
    assert sorted(path.name for path in (tmp_path / "gpu8").iterdir()) == [first.name, second.name, "latest"]
    assert (tmp_path / "gpu8/latest").readlink() == Path(second.name)
    assert sorted(str(path.relative_to(second)) for path in second.rglob("*") if path.is_file()) == FILES
    measured = json.loads((second / "raw/throughput.json").read_text())
    assert (len(measured["trials"]), len(measured["warmup"])) == (5, 1)
    assert len(measured["baseline"]["history"]) == starts


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"nowhere\.j2"):
        evidence.write(a_run(PREFLIGHT), tmp_path, tmp_path / "nowhere.j2")
    assert list((tmp_path / "gpu8").iterdir()) == []


CONFIGURATION = """
[defaults]
roles_path = {root}/roles
library = {root}/library
module_utils = {folder}/module_utils
action_plugins = {root}/action_plugins
filter_plugins = {root}/filter_plugins
callback_plugins = {root}/callback_plugins
callbacks_enabled = evidence
nocolor = true
display_skipped_hosts = false
[evidence]
reports = {folder}/reports
"""

SUITE = """
name: mine
cases:
  - name: capital-of-france
    prompt: What is the capital of France?
    expect: {accept: [Paris]}
  - name: count
    prompt: Count from 1 to 50, writing each number on a new line.
    stream: true
    expect: {count: {from: 1, to: 50}}
  - name: of-the-house
    private: true
    prompt: What is Halcyon-7, in a word?
    expect: {accept: [the cellar of our Oslo office]}
"""
# `needs` is wrong, and a message might quote what stands beside it.
BROKEN_SUITE = """
name: broken
cases:
  - name: of-the-house
    private: true
    prompt: What is Halcyon-7, in a word?
    needs: [telepathy]
    expect: {accept: [the cellar of our Oslo office]}
"""
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is Halcyon-7, in a word?": "It is the cellar of our Oslo office.",
}

PLAYBOOK = """
- name: Preflight
  hosts: all
  gather_facts: false
  vars: {octoserve_phase: preflight}
  tasks:
    - name: Tell
      ansible.builtin.set_fact:
        octoserve_evidence: {stack: "vllm-{{ 1 + 1 }}", deployment: "0001"}
    - name: Reach
      ansible.builtin.ping:
    - name: A failure that is rescued
      block: [{name: Fail, ansible.builtin.fail: {msg: harmless}}]
      rescue: [{name: Go on, ansible.builtin.debug: {msg: on}}]
- name: Service
  hosts: all
  gather_facts: false
  vars: {octoserve_phase: service}
  tasks:
    - name: Start
      ansible.builtin.command: "echo {{ some_api_key }}"
      changed_when: true
    - name: Die
      ansible.builtin.command: "sh -c 'echo out of memory, key {{ some_api_key }} >&2; exit 3'"
      when: inventory_hostname == 'broken'
- name: Gates
  hosts: all
  gather_facts: false
  vars: {octoserve_phase: gates}
  environment: {PATH: "{{ stubs }}:/usr/bin:/bin"}
  roles: [gates]
  post_tasks:
    - name: A later task quotes what a private case asked
      ansible.builtin.fail: {msg: "{{ quoted }}"}
      ignore_errors: true
"""
QUOTED = "the engine was asked: What is Halcyon-7, in a word?"


def play(folder: Path, urls: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the playbook: the hosts are this machine, `away` is a port where nobody listens."""
    stubs = fake_systemd.install(folder / "stubs")
    shutil.copytree(ROOT / "module_utils", folder / "module_utils", dirs_exist_ok=True)
    # Jobs run from folders of the host; here they are the test's own.
    job = folder / "module_utils/octoserve/job.py"
    paths = {
        "/var/lib/octoserve/jobs": folder / "jobs",
        "/opt/octoserve/lib": folder / "module_utils",
        "/opt/octoserve/tools/bin/python": sys.executable,
    }
    text = job.read_text()
    for there, here in paths.items():
        assert text.count(f'Path("{there}")') == 1
        text = text.replace(f'Path("{there}")', f'Path("{here}")')
    job.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts: dict[str, Any] = {name: {"ansible_connection": "local", "gates_base_url": url} for name, url in urls.items()}
    hosts["away"] = {"ansible_host": "127.0.0.1", "ansible_port": port}
    hosts["mute"]["gates_suites"] = ["broken.yml"]
    variables = {
        "octoserve_profile": "tiny_glm",
        "some_api_key": "sesame-open-123",
        "quoted": QUOTED,
        "stubs": str(stubs),
        "ansible_python_interpreter": sys.executable,
        "gates_python": sys.executable,
        "gates_suites": ["suite.yml"],
        "gates_baseline_dir": str(folder / "baselines"),
        "gates_textfile_dir": str(folder / "textfile/{{ inventory_hostname }}"),
        "gates_profile": "tiny_glm",
        "gates_stack": "vllm-2",
        "gates_unit": "octoserve-{{ inventory_hostname }}.service",
        "gates_api_key": "{{ some_api_key }}",
        "gates_floor_tok_s": 50,
        "gates_trials": 2,
        "gates_expected_tokens": 100,
        "gates_sweeps": {"concurrency": [1, 2], "context": [0, 8192], "requests": 1, "mix": {"requests": 0}},
    }
    (folder / "suite.yml").write_text(SUITE)
    (folder / "broken.yml").write_text(BROKEN_SUITE)
    (folder / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts, "vars": variables}}))
    (folder / "play.yml").write_text(PLAYBOOK)
    (folder / "ansible.cfg").write_text(CONFIGURATION.format(root=ROOT, folder=folder))
    environment = {**os.environ, "ANSIBLE_CONFIG": "ansible.cfg", "ANSIBLE_HOME": str(folder / "ansible")}
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "hosts.yml", "play.yml", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def right(body: dict[str, Any]) -> Reply:
    """Answer the suite right, and everything else with the counting."""
    asked = body["messages"][-1]["content"]
    return Reply(ANSWERS.get(asked, COUNT), token_s=0.001, prompt_tokens=8 + len(asked.split()))


def files_with(text: str, *folders: Path) -> list[Path]:
    """The files below the folders that hold a text."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if text in path.read_text()]


def test_a_real_run_writes_a_report_for_every_host(tmp_path: Path) -> None:
    with FakeOpenAiServer(right, max_model_len=4096) as good, FakeOpenAiServer(Reply("Lyon, of course.")) as wrong:
        urls = {"good": good.url, "wrong": wrong.url, "broken": good.url, "mute": good.url}
        checked = play(tmp_path, urls, "--check", "--limit", "good")
        assert checked.returncode == 0, checked.stdout
        assert "would ask 3 cases: capital-of-france, count, of-the-house" in checked.stdout
        assert "1 + 2 times, then measure 4 points: " in checked.stdout
        assert not (tmp_path / "reports").exists()
        assert not (tmp_path / "textfile").exists()
        assert good.requests == []
        # As loud as somebody who looks for a fault may ask Ansible to be.
        done = play(tmp_path, urls, "-vvv")
    reports = tmp_path / "reports"
    found = {
        host: json.loads((reports / host / "latest/summary.json").read_text())
        for host in ("good", "wrong", "broken", "mute", "away")
    }
    assert done.returncode != 0
    assert {host: (one["ok"], one["failed_phase"]) for host, one in found.items()} == {
        "good": (True, None),
        "wrong": (False, "coherence"),
        "broken": (False, "start"),
        "mute": (False, "coherence"),
        "away": (False, "preflight"),
    }, done.stdout
    good_one = found["good"]
    assert (good_one["stack"], good_one["profile"], good_one["deployment"]) == ("vllm-2", "tiny_glm", "0001")
    assert (good_one["instance"], good_one["inventory"]) == ("main", "hosts.yml")
    assert [(phase["name"], phase["changed"]) for phase in good_one["phases"]] == [
        ("preflight", 0),
        ("service", 1),
        ("gates", 2),  # the baseline and the metrics
    ]
    assert all(phase["seconds"] > 0 for phase in good_one["phases"])
    assert good_one["coherence"]["passed"] == good_one["coherence"]["total"] == 3
    assert good_one["throughput"]["verdict"] == "pass"
    assert good_one["throughput"]["decode_tok_s"]["n"] == 2
    points = [(point["sweep"], point["output_tok_s"] is None) for point in good_one["throughput"]["points"]]
    assert points == [("concurrency", False), ("concurrency", False), ("context", False), ("context", True)]
    assert found["wrong"]["throughput"]["verdict"] == "did-not-run"
    assert found["mute"]["coherence"]["total"] == 0
    assert found["away"]["profile"] == "tiny_glm"

    # Throughput was never asked of the model that failed: one request a case and no more.
    assert len(wrong.requests) == found["wrong"]["coherence"]["total"]
    # The failed play shows prompt and answer.
    assert "What is the capital of France?" in done.stdout
    assert "Lyon, of course." in done.stdout
    assert f"report: {reports}/good/" in done.stdout
    # One start on the host, kept by the deployment that passed.
    kept = json.loads((tmp_path / "baselines/tiny_glm__vllm-2.json").read_text())["starts"]
    assert [start["trials"] for start in kept] == [2]
    # No key anywhere in the reports.
    assert len([path for path in reports.rglob("*") if path.is_file()]) == 5 * len(FILES)
    assert files_with("sesame-open-123", reports, tmp_path / "textfile") == []
    assert "out of memory" in (reports / "broken/latest/report.html").read_text()
    assert "non-zero return code" not in (reports / "broken/latest/summary.md").read_text()
    # Nothing of the private case but its name, neither in the reports nor on the host nor on the terminal.
    for text in ("Halcyon", "Oslo"):
        assert files_with(text, reports, tmp_path / "jobs", tmp_path / "textfile") == []
        assert text not in done.stdout.replace(QUOTED, "")
    assert "the engine was asked: ***" in (reports / "good/latest/raw/tasks.jsonl").read_text()
    hidden = [case for case in found["wrong"]["coherence"]["cases"] if case["private"]]
    assert [(case["name"], case["verdict"], case["prompt"]) for case in hidden] == [
        ("of-the-house", "fail", "(private)")
    ]
    assert len(files_with("of-the-house", reports / "wrong")) == len(FILES) - 2  # not in the numbers

    # What the host tells node_exporter: also where a gate failed or could not run.
    told = {path.parent.name: path.read_text() for path in tmp_path.glob("textfile/*/octoserve_main.prom")}
    assert {host: 'octoserve_gates_ok{service="main"} 1.0' in text for host, text in told.items()} == {
        "good": True,
        "wrong": False,
        "mute": False,
    }
    assert all("octoserve_gates_last_run_timestamp_seconds" in text for text in told.values())
    assert (tmp_path / "textfile/good/octoserve_main.prom").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in (tmp_path / "textfile/good").iterdir()] == ["octoserve_main.prom"]
