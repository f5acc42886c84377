"""playbooks/status.yml says what it finds, also of files that a power cut or a full disk has damaged."""

from __future__ import annotations

from pathlib import Path

import local_play
import pytest

SYSTEMCTL = """#!/bin/sh
for name in ActiveState SubState Result NRestarts StateChangeTimestamp UnitFileState; do echo $name=some; done
"""
SOUND = {
    "watchdog": '{"verdict": "answers", "reason": "", "at": 1796000000.0}',
    "state/lock": '{"who": "ann", "what": "site.yml", "since": "noon"}',
}


def test_a_damaged_file_is_named_and_the_rest_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("sound", "damaged", "bare"):
        (tmp_path / host / "state").mkdir(parents=True)
        for name, text in SOUND.items() if host != "bare" else ():
            (tmp_path / host / name).write_text(text if host == "sound" else text[:20])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(SYSTEMCTL)
    (tmp_path / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    here = tmp_path / "{{ inventory_hostname }}"
    played = local_play.run(
        tmp_path,
        str(local_play.ROOT / "playbooks/status.yml"),
        variables={
            "octoserve": {"instance": "main", "host": "127.0.0.1", "port": 9, "state_dir": str(here / "state")},
            "octoserve_watchdog": str(here / "watchdog"),
        },
        hosts={host: {} for host in ("sound", "damaged", "bare")},
    )
    assert set(played.failed.values()) == {0}, played.output
    shown = " ".join(played.output.split("TASK [Status]")[1].split("PLAY RECAP")[0].split())
    told = dict(text.split("]", 1) for text in shown.split("ok: [")[1:])
    assert "watchdog: answers, at 2026-11-30" in told["sound"]
    assert "lock: last taken by ann (site.yml) at noon" in told["sound"]
    assert "watchdog is damaged" in told["damaged"]
    assert "state/lock is damaged" in told["damaged"]
    assert all("no deployment yet" in text for text in told.values())
    assert "has seen nothing since the last boot" in told["bare"]
    assert "lock:" not in told["bare"]
