"""The role `llama_gguf_split` in check mode on a controller that has gathered nothing yet, as in CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import local_play

BUILT = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
GIT = {"llama_gguf_split_source": "git", "llama_gguf_split_url": "https://git.example/llama.cpp"}
GIT |= {"llama_gguf_split_version": "b1", "llama_gguf_split_sha256": ""}
#: host -> what its tool was built from, if there is one, and variables
HOSTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "built": (BUILT, {}),
    "bare": (None, {}),
    "another": ("0" * 64, {}),
    "git_built": (BUILT, GIT),
    "git_bare": (None, GIT),
}


def test_a_check_run_tells_where_the_tool_would_be_built(tmp_path: Path) -> None:
    for host, (digest, variables) in HOSTS.items():
        place = tmp_path / host / str(variables.get("llama_gguf_split_version", "0.3.36"))
        (place / "bin").mkdir(parents=True)
        if digest:
            (place / "bin/llama-gguf-split").write_text("the tool")
            (place / "source.sha256").write_text(f"{digest}\n")
    play = {"hosts": "octoserve", "roles": ["llama_gguf_split"]}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    values = {
        "llama_gguf_split_dir": str(tmp_path / "{{ inventory_hostname }}"),
        "llama_gguf_split_state_dir": str(tmp_path / "state"),
        "llama_gguf_split_cache_dir": str(tmp_path / "sources"),
    }
    hosts = {host: variables for host, (_, variables) in HOSTS.items()}
    # Its packages would be this machine's.
    played = local_play.run(
        tmp_path, "--check", "--start-at-task=Bring the source*", "play.yml", variables=values, hosts=hosts
    )
    assert set(played.failed.values()) == {0}, played.output
    # Of git, whose digest nobody knows before it is fetched, what was built under its version counts.
    assert played.changed == {"built": 0, "bare": 1, "another": 1, "git_built": 0, "git_bare": 1}
    assert not (tmp_path / "sources").exists()
