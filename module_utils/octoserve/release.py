"""Releases: a stack's variant installed on a host in a folder of its own, patched, never changed once complete."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import atomic, patches, venv

RECORD = "release.json"
PARTIAL = ".partial"


class ReleaseError(RuntimeError):
    """A release cannot be made, or is no longer what it was; the message says what to do."""


@dataclass(frozen=True)
class Recipe:
    """What a release is made from. Paths are on the host."""

    name: str
    path: Path
    python: str
    stack: Path
    source: venv.Source
    imports: tuple[str, ...]
    uv: str
    operators: tuple[str, ...] = ()


def read_record(path: Path) -> dict[str, Any]:
    """What is recorded of a complete release, {} where the folder is none.

    Raises ReleaseError where the record cannot be read.
    """
    try:
        record = json.loads((path / RECORD).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ReleaseError(f"{path / RECORD} is damaged ({error}); remove {path} and run again") from error
    if not isinstance(record, dict):
        raise ReleaseError(f"{path / RECORD} is damaged; remove {path} and run again")
    return record


def make(recipe: Recipe, phase: Callable[[str], None]) -> dict[str, Any]:
    """Install, patch, compile and try a release beside its place, then put it there. Returns its record.

    A complete release is left alone, for a service may run from it. `phase` is told each step. Raises ReleaseError,
    VenvError or PatchError; what was made so far is removed at the next attempt.
    """
    complete = read_record(recipe.path)
    if complete:
        return complete
    partial = recipe.path.with_name(f".{recipe.path.name}{PARTIAL}")
    # Also what other attempts left that nobody will finish: a release takes 15 GB.
    for left in recipe.path.parent.glob(f".*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    phase("install packages")
    venv.create(partial, recipe.python, recipe.source, recipe.uv)
    python = partial / "bin/python"
    phase("apply patches")
    shutil.copytree(recipe.stack, partial / "stack")
    series = patches.load_series(partial / "stack", str(python))
    site_packages = patches.site_packages_of(str(python))
    patches.check_versions(series, site_packages)
    patches.write(patches.plan(series, site_packages), site_packages)
    phase("compile byte-code")
    _compile(python, site_packages, partial, recipe.path)
    phase("try the imports")
    versions = _try_imports(python, recipe.imports, recipe.operators)
    record = {
        "release": recipe.name,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "lock": hashlib.sha256(recipe.source.lock.read_bytes()).hexdigest(),
        "versions": versions,
        "patches": [patch.file for patch in series.patches],
        "files": patches.final_hashes(series),
    }
    atomic.write_text(partial / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
    phase("put in place")
    shutil.rmtree(recipe.path, ignore_errors=True)  # incomplete: it has no record
    partial.rename(recipe.path)
    return record


def _compile(python: Path, site_packages: Path, partial: Path, final: Path) -> None:
    """Compile all modules now: the service's user may not write here, and would compile at every start."""
    # -f: what the steps before imported was compiled with the partial folder's name.
    options = ["-q", "-f", "-j", "0", "-s", str(partial), "-p", str(final)]
    command = [str(python), "-m", "compileall", *options, str(site_packages)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Some packages ship files for other Pythons on purpose; a module that is needed fails at its import.
    if done.returncode not in (0, 1):
        raise ReleaseError(f"compileall ended with {done.returncode}: {done.stderr.strip()[-1000:]}")


_TRY = """
import functools, importlib, json, sys
imports, operators = json.loads(sys.argv[1])
found = {name: str(getattr(importlib.import_module(name), "__version__", "")) for name in imports}
if operators:
    import torch
    from vllm.platforms import current_platform
    current_platform.import_kernels()
    for name in operators:
        functools.reduce(getattr, name.split("."), torch.ops)
print(json.dumps(found))
"""


def _try_imports(python: Path, imports: tuple[str, ...], operators: tuple[str, ...]) -> dict[str, str]:
    """Import each module and look for each operator in one fresh process; returns the modules' versions."""
    command = [str(python), "-c", _TRY, json.dumps([imports, operators])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        wanted = ", ".join([*imports, *operators])
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        # The exception stands last in a traceback; a reader wants it first.
        raise ReleaseError(f"importing {wanted} failed: {lines[-1]}\n" + "\n".join(lines[-30:-1]))
    versions: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return versions
