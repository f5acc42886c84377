"""The folders that people rely on, and commands from the folders that they stand in."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def settings(path: Path) -> dict[str, str]:
    parser = configparser.ConfigParser()
    parser.read(path)
    return {f"{section} {name}": value for section in parser.sections() for name, value in parser[section].items()}


def test_both_configurations_say_the_same() -> None:
    here, below = settings(ROOT / "ansible.cfg"), settings(ROOT / "playbooks/ansible.cfg")
    assert here == {name: value.removeprefix("../") for name, value in below.items()}
    assert [value for value in below.values() if value.startswith("../")]


@pytest.mark.parametrize(("folder", "playbook"), [(".", "playbooks/gates.yml"), ("playbooks", "gates.yml")])
def test_a_chapter_is_found_from_root_and_from_its_folder(folder: str, playbook: str) -> None:
    command = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, "--list-tasks", "--list-hosts"]
    done = subprocess.run(command, cwd=ROOT / folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gates : Ask the questions" in done.stdout or "Find the service" in done.stdout
    assert "sandbox" in done.stdout
    assert "WARNING" not in done.stderr, done.stderr


@pytest.mark.parametrize("tag", ["preflight", "release", "model"])
def test_a_chapter_runs_alone(tag: str) -> None:
    """A role in `roles` checks its arguments under every tag, and so fails without the facts of the chapters before."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "site.yml", "--list-tasks", f"--tags={tag}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"TAGS: [{tag}]" in done.stdout
    assert not re.search(r"^ +(vllm_service|gates) : ", done.stdout, re.MULTILINE), done.stdout


def test_the_story_of_a_deploy_is_imports_only() -> None:
    lines = [line.strip() for line in (ROOT / "site.yml").read_text().splitlines()]
    kinds = ("- name:", "ansible.builtin.import_playbook:", "tags:", "#", "---")
    assert [line for line in lines if line and not line.startswith(kinds)] == []


def test_every_setting_stands_in_the_docs() -> None:
    used = set(re.findall(r"\b(octoserve_\w+) \| default", (ROOT / "playbooks/vars/settings.yml").read_text()))
    shown = set(re.findall(r"^\| `(octoserve_\w+)` \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE))
    assert used | {"octoserve_profile"} == shown
