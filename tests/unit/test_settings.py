"""What the chapters hand to the roles follows from the inventory and the profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLAYBOOK = """---
- name: Show the stack
  hosts: localhost
  gather_facts: false
  vars_files: ["{root}/playbooks/vars/settings.yml"]
  tasks:
    - name: Write it
      ansible.builtin.copy:
        content: "{{{{ octoserve.profile.stack | to_json }}}}"
        dest: "{out}"
        mode: "0600"
"""


def stack_of(folder: Path, **variables: str) -> Any:
    """The stack of a host that serves the demo's profile, with some settings."""
    playbook, out = folder / "show.yml", folder / "stack.json"
    playbook.write_text(PLAYBOOK.format(root=ROOT, out=out))
    local = {"octoserve_profile": "tiny_glm", "ansible_python_interpreter": sys.executable}
    values = json.dumps({**local, **variables})
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "--inventory=localhost,", "--connection=local"]
    done = subprocess.run(
        [*command, f"--extra-vars={values}", str(playbook)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in ROOT.glob("files/patches/*/stack.yml")))
def test_a_host_takes_another_stack_than_its_profile_names(tmp_path: Path, folder: str) -> None:
    assert stack_of(tmp_path, octoserve_stack=folder) == {"name": folder, "variant": "cpu"}


def test_the_profile_names_the_stack(tmp_path: Path) -> None:
    assert stack_of(tmp_path) == {"name": "vllm-0.32.0", "variant": "cpu"}
