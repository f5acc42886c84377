"""The chapter `model` asks for the tool that merges only where something is to be merged."""

from __future__ import annotations

from pathlib import Path

import gguf_writer
import local_play
from octoserve.receipt import Receipt

SPLITS = [f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
SOURCES = [{"url": "https://hub.example/org/repo/resolve/main", "files": [{"path": name} for name in SPLITS]}]
HOSTS = ("merged", "by_hand", "fresh")


def test_what_is_not_merged_needs_no_tool(tmp_path: Path) -> None:
    whole = gguf_writer.gguf(gguf_writer.tiny_metadata(), gguf_writer.tiny_parts()[0])
    for host in HOSTS:
        (tmp_path / host / "models/tiny").mkdir(parents=True)
    merged, by_hand = tmp_path / "merged/models/tiny/tiny.gguf", tmp_path / "by_hand/GLM.gguf"
    merged.write_bytes(whole)
    by_hand.write_bytes(whole)
    Receipt(merged.parent).record(merged.name, "0" * 64, dict.fromkeys(SPLITS, "1" * 64))
    here = tmp_path / "{{ inventory_hostname }}"
    octoserve = {
        "home": str(here / "home"),
        "state_dir": str(here / "state"),
        "models_dir": str(here / "models"),
        "source_dir": str(tmp_path / "sources"),
        "lock_timeout": 1,
        "replace_model": False,
        "hub_token": "",
        "profile": {"model": {"name": "tiny", "sources": SOURCES, "prepare": "merge"}},
    }
    played = local_play.run(
        tmp_path,
        "--check",
        str(local_play.ROOT / "playbooks/model.yml"),
        variables={"octoserve": octoserve, "llama_gguf_split_packages": []},
        hosts={host: {"gguf_model_merged_path": str(by_hand)} if host == "by_hand" else {} for host in HOSTS},
    )
    assert played.hosts_of("Bring the source to the controller (kept between runs)") == {"fresh"}, played.output
    assert {host: played.changed[host] for host in ("merged", "by_hand")} == {"merged": 0, "by_hand": 1}
    assert {played.failed[host] for host in ("merged", "by_hand")} == {0}
