#!/usr/bin/env python3
"""Deploy the demo without each patch that it needs, and record how that ends: `make test-demo-patches`.

A long suite (about three minutes a patch). The demo needs the patches that tests/patches/mutations.yml leaves out to
serve as a CPU does: no further options, the first model. It works on a clone of HEAD with a sandbox host of its own,
so that the checkout and the demo's host stay as they are, and writes `tests/demo/without_each_patch.json` with the
commit.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
STACK = Path("files/patches/vllm-0.32.0")
ADDRESS = "127.0.0.5"
RESULT = Path(__file__).with_suffix(".json")
COVERS = [str(STACK), "files/gates/tiny_glm.yml", "files/profiles/tiny_glm.yml", "tests/fixtures/tiny_glm"]


def playbook(clone: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook of the clone against its host, with the wheels and sources that are gathered already."""
    shared = {
        "octoserve_wheelhouse_dir": str(ROOT / ".cache/wheelhouses"),
        "octoserve_source_dir": str(ROOT / ".cache/sources"),
        "ansible_host": ADDRESS,
    }
    command = [
        "ansible-playbook",
        name,
        "--inventory=inventory/sandbox",
        f"--extra-vars={json.dumps(shared)}",
        *arguments,
    ]
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(clone / "ansible.cfg"),
        "OCTOSERVE_REPORTS": str(clone / "reports"),
    }
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False, env=environment)


def outcome(clone: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a deploy ended with: exit code, phase, and the message or the cases that failed."""
    summary = json.loads((clone / "reports/sandbox/latest/summary.json").read_text())
    cases = [case for case in summary["coherence"]["cases"] if case["verdict"] != "pass"]
    errors = [line.strip() for line in done.stdout.splitlines() if line.startswith("[ERROR]")]
    return {
        "exit": done.returncode,
        "failed_phase": summary["failed_phase"],
        "error": errors[-1][:400] if errors else "",
        "coherence": f"{summary['coherence']['passed']} of {summary['coherence']['total']}",
        "wrong_answers": [f"{case['name']}: {case['reason']}"[:200] for case in cases[:3]],
    }


def needed() -> list[list[str]]:
    """The patches that the demo needs, each with the later ones that build on it."""
    mutations = yaml.safe_load((ROOT / "tests/patches/mutations.yml").read_text())
    return [
        mutation["take_out"]
        for mutation in mutations.values()
        if "take_out" in mutation and not {"model", "options"} & set(mutation)
    ]


def main() -> int:
    """Deploy whole, then without each patch. Exit status 1 where a deploy without one passed."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as folder:
        clone = Path(folder) / "octoserve"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        series_file = clone / STACK / "series.yml"
        series_text = series_file.read_text()
        series = yaml.safe_load(series_text)
        try:
            playbook(clone, "playbooks/sandbox.yml").check_returncode()
            whole = playbook(clone, "site.yml")
            rows["(whole)"] = outcome(clone, whole)
            print(json.dumps({"(whole)": rows["(whole)"]}), flush=True)
            for left_out in needed() if whole.returncode == 0 else []:
                texts = {clone / STACK / file: (clone / STACK / file).read_text() for file in left_out}
                for patch in texts:
                    patch.unlink()
                rest = [entry for entry in series["patches"] if entry["file"] not in left_out]
                series_file.write_text(yaml.safe_dump({**series, "patches": rest}, sort_keys=False))
                rows[left_out[0]] = outcome(clone, playbook(clone, "site.yml"))
                print(json.dumps({left_out[0]: rows[left_out[0]]}), flush=True)
                for patch, text in texts.items():
                    patch.write_text(text)
                series_file.write_text(series_text)
        finally:
            playbook(clone, "playbooks/sandbox.yml", "--extra-vars=sandbox_state=absent")
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    RESULT.write_text(json.dumps({"commit": commit, "date": date, "covers": COVERS, "deploys": rows}, indent=1) + "\n")
    passed = [name for name, row in rows.items() if name != "(whole)" and row["exit"] == 0]
    if rows["(whole)"]["exit"] != 0 or passed:
        print(f"the whole series ended {rows['(whole)']['exit']}; passed without: {passed or 'none'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
