#!/usr/bin/env python3
"""Install one variant of a stack, unpatched, for the tests of its patches.

usage: scripts/stack_venv.py STACK VARIANT FOLDER

The wheels come from the same wheelhouse that a deploy to the sandbox gathers, so that each is downloaded once.
Needs module_utils on PYTHONPATH, as `make` sets it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from octoserve import stack, venv, wheelhouse

ROOT = Path(__file__).resolve().parents[1]


def interpreter(version: str, uv: str) -> str:
    """A Python of the lock's version: this machine's, else one that uv brings (from github.com)."""
    here = shutil.which(f"python{version}")
    # A name may be there and not work: version managers put such stand-ins on PATH.
    if here and subprocess.run([here, "--version"], capture_output=True, check=False).returncode == 0:
        return here
    print(f"stack_venv: no python{version} on this machine, asking uv for one", flush=True)
    subprocess.run([uv, "python", "install", "--quiet", version], check=True)
    found = subprocess.run([uv, "python", "find", version], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main(name: str, variant_name: str, path: Path) -> int:
    """Make the environment unless it is complete."""
    folder = ROOT / "files/patches" / name
    variant = stack.variant(folder, yaml.safe_load((folder / "stack.yml").read_text()), variant_name)
    if venv.is_installed(path, venv.digest(variant.lock)):
        return 0
    target = wheelhouse.Target(variant.python)
    archive = wheelhouse.archive_path(
        ROOT / ".cache/wheelhouses", f"{name}-{variant_name}", variant.lock.read_bytes(), target
    )
    if not archive.exists():
        print(f"stack_venv: gathering the wheels of {name} {variant_name}", flush=True)
        wheelhouse.gather(variant.lock, archive, target, variant.extra_index_urls)
    print(f"stack_venv: installing {name} {variant_name} into {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    source = venv.Source(variant.lock, archive)
    uv = str(ROOT / ".venv/bin/uv")
    venv.make(path, interpreter(variant.python, uv), source, uv)
    # Where PYTHONDONTWRITEBYTECODE is set, each of the many interpreters that the tests start would compile it all.
    # Some packages hold templates that are no Python, so that the exit status says nothing.
    subprocess.run([str(path / "bin/python"), "-m", "compileall", "-qq", str(path / "lib")], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
