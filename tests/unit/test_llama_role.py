"""The role `llama_gguf_split` in check mode on a controller that has gathered nothing yet, as in CI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
GIT = {"llama_gguf_split_source": "git", "llama_gguf_split_url": "https://git.example/llama.cpp"}


def changes(folder: Path, **variables: str) -> int:
    """What a check run of the role would change, its packages apart."""
    play = {"hosts": "localhost", "gather_facts": False, "roles": ["llama_gguf_split"]}
    (folder / "play.yml").write_text(json.dumps([play]))
    (folder / "ansible.cfg").write_text("")  # the project's own would write evidence
    values = {
        "llama_gguf_split_dir": str(folder / "llama.cpp"),
        "llama_gguf_split_state_dir": str(folder / "state"),
        "llama_gguf_split_cache_dir": str(folder / "sources"),
        "ansible_python_interpreter": sys.executable,
        **variables,
    }
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "ANSIBLE_LIBRARY": str(ROOT / "library"),
        "ANSIBLE_MODULE_UTILS": str(ROOT / "module_utils"),
        "ANSIBLE_ACTION_PLUGINS": str(ROOT / "action_plugins"),
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
        "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
        "NO_COLOR": "1",
    }
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", "-c", "local", "--check"]
    command += ["--start-at-task=Bring the source*", f"--extra-vars={json.dumps(values)}", str(folder / "play.yml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "sources").exists()
    return int(re.findall(r"changed=(\d+)", done.stdout)[-1])


def tool(folder: Path, version: str, digest: str) -> None:
    place = folder / "llama.cpp" / version
    (place / "bin").mkdir(parents=True)
    (place / "bin/llama-gguf-split").write_text("the tool")
    (place / "source.sha256").write_text(f"{digest}\n")


def test_a_tool_that_was_built_from_the_pinned_source_is_nothing_to_do(tmp_path: Path) -> None:
    tool(tmp_path, "0.3.36", BUILT)
    assert changes(tmp_path) == 0


@pytest.mark.parametrize("digest", [None, "0" * 64], ids=["none", "another"])
def test_a_tool_that_is_not_there_or_of_another_source_is_built(tmp_path: Path, digest: str | None) -> None:
    if digest:
        tool(tmp_path, "0.3.36", digest)
    assert changes(tmp_path) == 1


def test_of_git_what_was_built_under_its_version_counts(tmp_path: Path) -> None:
    git = {**GIT, "llama_gguf_split_version": "b1", "llama_gguf_split_sha256": ""}
    assert changes(tmp_path, **git) == 1
    tool(tmp_path, "b1", BUILT)
    assert changes(tmp_path, **git) == 0
