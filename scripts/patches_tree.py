"""Edit code, not diffs: a stack's patch series as a git tree, one commit a patch, and back.

``import`` unpacks the stack's wheels into a git tree and commits each patch. Edit there with git's own means
(rebase, fixup, new commits). ``export`` writes the patches and ``series.yml`` from the commits. A commit message
is the patch's DEP-3 header: subject and body are its Description, the last paragraph its other fields.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import stack_wheels
import yaml
from octoserve import atomic, patches, stack, unified_diff, wheelhouse

RELEASED = "released"
SERIES_NOTE = "# Written by `make patches-export`: edit the commits of the tree, not this file."
#: Whatever the developer's own git configuration says, a tree comes out the same.
_IDENTITY = {
    f"GIT_{who}_{key}": value
    for who in ("AUTHOR", "COMMITTER")
    for key, value in (("NAME", "Octoserve"), ("EMAIL", "octoserve@localhost"))
}


class TreeError(RuntimeError):
    """The tree or the wheels are not as they have to be."""


def to_message(headers: Mapping[str, str]) -> str:
    """A patch's DEP-3 header as a commit message."""
    subject, _, body = headers["Description"].partition("\n")
    fields = "".join(f"{key}: {value}\n" for key, value in headers.items() if key != "Description")
    return "\n".join(part for part in (subject + "\n", body and body.strip("\n") + "\n", fields) if part)


def to_headers(message: str, name: str) -> dict[str, str]:
    """A commit message as a patch's DEP-3 header. Raises patches.PatchError for a field that is missing."""
    subject, _, rest = message.strip("\n").partition("\n")
    body, _, fields = rest.strip("\n").rpartition("\n\n")
    description = "\n".join(part for part in (subject, body.strip("\n")) if part)
    return patches.parse_headers(_header_text({"Description": description}) + fields + "\n", name)


def to_patch(headers: Mapping[str, str], diffs: str) -> str:
    """The text of a patch file."""
    return f"{_header_text(headers)}---\n{diffs}"


def to_name(number: int, headers: Mapping[str, str]) -> str:
    """``NNNN-title.patch``."""
    slug = re.sub(r"[^a-z0-9]+", "-", headers["Description"].partition("\n")[0].lower()).strip("-")
    return f"{number:04d}-{slug}.patch"


def to_series(builds: Mapping[str, list[str]], entries: list[dict[str, object]]) -> str:
    """The text of ``series.yml``."""
    lines = ["---", SERIES_NOTE]
    if builds:
        lines += ["# Other distributions with the same Python files.", "builds:"]
        lines += [f"  {name}: [{', '.join(others)}]" for name, others in builds.items()]
    lines.append("patches:" if entries else "patches: []")
    for entry in entries:
        lines.append(f"  - file: {entry['file']}")
        lines += [f"    distribution: {entry['distribution']}", f'    version: "{entry["version"]}"']
        lines += [f"    proof: {entry['proof']}", "    files:"]
        files = entry["files"]
        assert isinstance(files, dict)
        for path, hashes in sorted(files.items()):
            lines += [f"      {path}:", f"        before: {hashes.before or 'null'}"]
            lines += [f"        after: {hashes.after or 'null'}"]
    return "\n".join(lines) + "\n"


def import_series(folder: Path, tree: Path, wheels: list[Path]) -> int:
    """Make the tree. Returns the number of patches. Raises TreeError and patches.PatchError."""
    if not wheels:
        raise TreeError("found no wheel to unpack, wanted those of the distributions that the series patches")
    if tree.exists():
        raise TreeError(f"{tree} exists; export or remove it first")
    series = patches.load_series(folder)
    tree.mkdir(parents=True)
    git(tree, "init", "--quiet", "--initial-branch=series")
    commit_released(tree, wheels)
    patches.check_versions(series, tree)
    for count, patch in enumerate(series.patches, 1):
        patches.write(patches.plan(patches.Series(series.patches[:count]), tree), tree)
        commit_all(tree, to_message(patch.headers), patch.headers["Last-Update"])
    return len(series.patches)


def export_series(folder: Path, tree: Path) -> int:
    """Write the patches and ``series.yml``. Returns their number. Raises TreeError and patches.PatchError."""
    if git(tree, "status", "--porcelain"):
        raise TreeError(f"{tree} has changes that are in no commit; commit or drop them first")
    document = yaml.safe_load((folder / "series.yml").read_text(encoding="utf-8")) or {}
    texts: dict[str, str] = {}
    entries: list[dict[str, object]] = []
    commits = git(tree, "rev-list", "--reverse", f"{RELEASED}..HEAD").split()
    for number, commit in enumerate(commits, 1):
        headers = to_headers(git(tree, "show", "--no-patch", "--format=%B", commit), commit[:12])
        paths = git(tree, "diff-tree", "--no-commit-id", "--name-only", "-r", "-z", commit).split("\0")[:-1]
        sides = {path: (blob(tree, f"{commit}^", path), blob(tree, commit, path)) for path in sorted(paths)}
        name = to_name(number, headers)
        texts[name] = to_patch(headers, "".join(unified_diff.make(path, *side) for path, side in sides.items()))
        distribution, _, version = headers["Applies-To"].partition(" ")
        hashes = {path: patches.FileHashes(*map(patches.sha256, side)) for path, side in sides.items()}
        entries.append(
            {
                "file": name,
                "distribution": distribution,
                "version": version,
                "proof": headers["Proof"],
                "files": hashes,
            }
        )
    series = to_series(document.get("builds") or {}, entries)
    patches.parse_series(yaml.safe_load(series), texts)
    for name, text in texts.items():
        atomic.write_text(folder / name, text)
    atomic.write_text(folder / "series.yml", series)
    for path in folder.glob("*.patch"):
        if path.name not in texts:
            path.unlink()
    return len(texts)


def commit_released(tree: Path, wheels: list[Path]) -> None:
    """Commit the wheels' files into an empty tree and mark them as released."""
    stack_wheels.unpack(wheels, tree)
    commit_all(tree, f"Released: {', '.join(sorted(wheel.name for wheel in wheels))}\n", "2000-01-01")
    git(tree, "tag", "--force", RELEASED)


def commit_all(tree: Path, message: str, date: str) -> None:
    """Commit all that is in the tree, as of that day."""
    git(tree, "add", "--all", "--force")
    stamp = f"{date}T00:00:00Z"
    dates = {"GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp}
    git(tree, "commit", "--quiet", "--cleanup=verbatim", "--file=-", stdin=message, env={**_IDENTITY, **dates})


def keep_aside(tree: Path, branch: str, commit: str, message: str) -> None:
    """Make a branch of a commit's change under another message."""
    made = git(tree, "commit-tree", f"{commit}^{{tree}}", "-p", f"{commit}^", "-F", "-", stdin=message, env=_IDENTITY)
    git(tree, "branch", branch, made.strip())


def blob(tree: Path, commit: str, path: str) -> str | None:
    """A file's text in a commit, None where it is absent."""
    listed = git(tree, "ls-tree", "--name-only", "-z", commit, "--", path)
    return git(tree, "cat-file", "blob", f"{commit}:{path}") if listed else None


def git(tree: Path, *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
    """Run git in the tree and return its output. Raises TreeError."""
    command = ["git", "-C", str(tree), "-c", "core.autocrlf=false", "-c", "commit.gpgsign=false", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, input=stdin.encode(), env={**os.environ, **(env or {})}
    )
    if done.returncode:
        raise TreeError(f"git {arguments[0]} in {tree}: {done.stderr.decode().strip()}")
    return done.stdout.decode()


def _header_text(headers: Mapping[str, str]) -> str:
    lines = []
    for key, value in headers.items():
        first, *rest = value.split("\n")
        lines += [f"{key}: {first}", *(f" {line}" if line else " ." for line in rest)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line, as `make patches-import` and `make patches-export` call it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["import", "export"])
    parser.add_argument("stack", type=Path, help="folder of the stack, files/patches/<stack>")
    parser.add_argument("tree", type=Path, help="the git tree, .cache/patches/<stack>")
    parser.add_argument("--variant", help="whose locked wheels to unpack (default: the stack's first)")
    options = parser.parse_args()
    try:
        if options.command == "export":
            print(f"{options.stack}: wrote {export_series(options.stack, options.tree)} patches")
            return 0
        series = patches.load_series(options.stack)
        document = yaml.safe_load((options.stack / "stack.yml").read_text(encoding="utf-8"))
        variant = stack.variant(options.stack, document, options.variant or next(iter(document["variants"])))
        wheels = stack_wheels.fetch(variant, series.distributions())
        count = import_series(options.stack, options.tree, wheels)
    except (TreeError, patches.PatchError, stack.StackError, wheelhouse.WheelhouseError, OSError) as error:
        print(f"patches_tree: {error}", file=sys.stderr)
        return 1
    print(f"{options.tree}: {count} commits on {RELEASED}; edit, commit, then `make patches-export`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
