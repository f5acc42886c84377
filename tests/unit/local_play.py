"""Runs plays on this machine as if it were the hosts: in a folder of their own, as whoever runs the tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("action_plugins", "filter_plugins", "callback_plugins", "module_utils")


@dataclass(frozen=True)
class Played:
    """What a run said, and how many tasks changed something or failed, by host."""

    output: str
    changed: dict[str, int]
    failed: dict[str, int]

    def hosts_of(self, task: str) -> set[str]:
        """The hosts that tasks of this name ran on; one that skipped them is left out."""
        parts = re.split(r"^(?:TASK|RUNNING HANDLER) \[", self.output, flags=re.MULTILINE)[1:]
        sections = [text for text in parts if text.split("]")[0].endswith(task)]
        return {host for text in sections for host in re.findall(r"^(?:ok|changed|fatal): \[(\w+)", text, re.MULTILINE)}

    def failure(self, host: str) -> str:
        """What the last task that failed on a host said, on one line."""
        said = re.split(rf"^fatal: \[{host}\]: FAILED! =>", self.output, flags=re.MULTILINE)[-1]
        return " ".join(re.split(r"^(?:TASK|RUNNING|PLAY|fatal:) ", said, flags=re.MULTILINE)[0].split())


def run(
    folder: Path, *command: str, variables: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]] | None = None
) -> Played:
    """`ansible-playbook` with the project's modules and `<folder>/ansible.cfg` for hosts of the group `octoserve`.

    Modules of `<folder>/library` and roles of `<folder>/roles` come before the project's.
    """
    settings = {name: str(ROOT / name) for name in FOLDERS}
    settings |= {"library": f"{folder}/library:{ROOT}/library", "roles_path": f"{folder}/roles:{ROOT}/roles"}
    settings |= {"display_skipped_hosts": "False", "gathering": "explicit", "callback_result_format": "yaml"}
    (folder / "ansible.cfg").write_text("[defaults]\n" + "".join(f"{key} = {text}\n" for key, text in settings.items()))
    values = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": sys.executable,
        "octoserve_root": str(ROOT),
        **variables,
    }
    (folder / "hosts.json").write_text(json.dumps({"octoserve": {"hosts": dict(hosts or {"here": {}})}}))
    (folder / "values.json").write_text(json.dumps(values))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
        "ANSIBLE_HOME": str(folder / "ansible"),
        "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
        "NO_COLOR": "1",
    }
    words = [str(Path(sys.executable).with_name("ansible-playbook")), f"--inventory={folder / 'hosts.json'}"]
    words += [f"--extra-vars=@{folder / 'values.json'}", *command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    recap = re.findall(r"^(\w+) +: ok=\d+ +changed=(\d+) +unreachable=\d+ +failed=(\d+)", done.stdout, re.MULTILINE)
    assert recap, done.stdout + done.stderr
    changed, failed = ({words[0]: int(words[place]) for words in recap} for place in (1, 2))
    return Played(done.stdout + done.stderr, changed, failed)
