#!/usr/bin/env python3
"""Print which committed results of long suites are older than the code that they speak of.

A result is a JSON file below tests/ with `commit` (what it was made on) and `covers` (paths that it speaks of).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in the project."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def verdict(commit: str, covers: list[str]) -> str:
    """`current`, or why the result may not hold for the code of today."""
    later = git("log", "--oneline", f"{commit}..HEAD", "--", *covers)
    if later.returncode != 0:
        return f"made on {commit[:10]}, which this clone does not know"
    changes = later.stdout.splitlines()
    return f"OLDER than {len(changes)} changes, the last {changes[0]}" if changes else "current"


def main() -> int:
    """Always ends 0: an old result is to be known, not an error."""
    for path in sorted(Path(name) for name in git("ls-files", "tests/*.json").stdout.split()):
        content = json.loads((ROOT / path).read_text())
        if isinstance(content, dict) and "commit" in content and "covers" in content:
            print(f"result {path}: {verdict(content['commit'], content['covers'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
