"""Carry a patch series, as its git tree has it, to other releases of the distributions that it patches.

Each patch is merged into the new release by git, three ways: released then, patched then, released now. What git
merges is written against the new text, because the module that applies a series takes no fuzz.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import patches_tree
from octoserve import patches, unified_diff

APPLIES, ABSORBED, CONFLICTS = "applies", "absorbed upstream", "conflicts"
#: Branches with what conflicts, for `git cherry-pick`.
LEFT_OUT = "left-out"
_MERGE = ("-c", "rerere.enabled=false", "-c", "merge.renames=true")


@dataclass(frozen=True)
class Outcome:
    """What became of a patch. ``remarks`` say what moved, or where it conflicts with what was found there."""

    patch: str
    verdict: str
    remarks: tuple[str, ...] = ()


def carry(
    tree: Path, series: patches.Series, wheels: list[Path], versions: Mapping[str, str], origin: str
) -> list[Outcome]:
    """Put the series of an imported tree on other wheels; its branch ``series`` then holds what applies.

    ``versions`` are those of the new wheels by distribution (``Applies-To``). The commits before stay on the branch
    ``origin``, patches that conflict on ``left-out/NNNN-title``. Raises TreeError.
    """
    picks = patches_tree.git(tree, "rev-list", "--reverse", f"{patches_tree.RELEASED}..HEAD").split()
    patches_tree.git(tree, "branch", "--move", origin)
    patches_tree.git(tree, "checkout", "--quiet", "--orphan", "series")
    patches_tree.git(tree, "rm", "--quiet", "-r", "--force", ".")
    patches_tree.commit_released(tree, wheels)
    return [_carry_one(tree, patch, commit, versions) for patch, commit in zip(series.patches, picks)]


def collisions(path: str, base: str, ours: str, theirs: str) -> list[str]:
    """Where upstream changed the lines that a patch changes, or the ones beside them: hunk, line, found and wanted.

    ``base`` is the text that the patch was made for, ``theirs`` what it makes of that, ``ours`` the new release's.
    """
    before, now = unified_diff.split_lines(base), unified_diff.split_lines(ours)
    _, (diff,) = unified_diff.parse(unified_diff.make(path, base, theirs))
    patched = unified_diff.split_lines(theirs)
    upstream = _changes(before, now)
    found = []
    for start, stop, new_start, new_stop in _changes(before, patched):
        hunk = next(n for n, hunk in enumerate(diff.hunks, 1) if start <= hunk.old_start + len(hunk.old))
        for first, last, new_first, new_last in upstream:
            same = (first, last, now[new_first:new_last]) == (start, stop, patched[new_start:new_stop])
            if first <= stop and start <= last and not same:
                found.append(
                    f"{path}, hunk {hunk}, line {new_first + 1}: found {_quote(now[new_first:new_last])}, "
                    f"wanted {_quote(before[first:last])}"
                )
    return found


def moved(before: Sequence[unified_diff.FileDiff], after: Sequence[unified_diff.FileDiff]) -> tuple[str, ...]:
    """How the new diffs differ from the old: by files and lines that moved, or by what stands around or in them."""
    remarks = []
    new = {diff.path: diff for diff in after}
    for diff in before:
        other = new.pop(diff.path, None)
        if other is None:
            remarks.append(f"{diff.path} is left as it is upstream")
        elif [(hunk.old, hunk.new) for hunk in diff.hunks] != [(hunk.old, hunk.new) for hunk in other.hunks]:
            remarks.append(f"{diff.path} rewritten")
        else:
            by = sorted({now.old_start - then.old_start for then, now in zip(diff.hunks, other.hunks)} - {0})
            if by:
                remarks.append(f"{diff.path} moved by {' and '.join(f'{lines:+d}' for lines in by)} lines")
    return (*remarks, *(f"{path} changed instead" for path in new))


def _carry_one(tree: Path, patch: patches.Patch, commit: str, versions: Mapping[str, str]) -> Outcome:
    distribution = patch.headers["Applies-To"].partition(" ")[0]
    headers = {**patch.headers, "Applies-To": f"{distribution} {versions[distribution]}"}
    message = patches_tree.to_message(headers)
    try:
        patches_tree.git(tree, *_MERGE, "cherry-pick", "--no-commit", commit)
    except patches_tree.TreeError:
        remarks = _conflicts(tree)
        if not remarks:
            raise
        patches_tree.git(tree, "reset", "--quiet", "--hard")
        patches_tree.keep_aside(tree, f"{LEFT_OUT}/{Path(patch.file).stem}", commit, message)
        return Outcome(patch.file, CONFLICTS, remarks)
    paths = patches_tree.git(tree, "diff", "--cached", "--name-only", "--no-renames", "-z").split("\0")[:-1]
    if not paths:
        return Outcome(patch.file, ABSORBED)
    patches_tree.commit_all(tree, message, headers["Last-Update"])
    sides = {path: [patches_tree.blob(tree, side, path) for side in ("HEAD^", "HEAD")] for path in sorted(paths)}
    _, diffs = unified_diff.parse("".join(unified_diff.make(path, *side) for path, side in sides.items()))
    return Outcome(patch.file, APPLIES, moved(patch.diffs, diffs))


def _conflicts(tree: Path) -> tuple[str, ...]:
    """What git could not merge. The index has a file's text before the patch, of the new release, and patched."""
    stages: dict[str, dict[str, str]] = {}
    for entry in patches_tree.git(tree, "ls-files", "--unmerged", "-z").split("\0")[:-1]:
        (_, blob, stage), path = entry.partition("\t")[0].split(" "), entry.partition("\t")[2]
        stages.setdefault(path, {})[stage] = patches_tree.git(tree, "cat-file", "blob", blob)
    remarks = []
    for path, texts in stages.items():
        if set(texts) == {"1", "2", "3"}:
            # git and difflib may align a text differently: then only the file is known.
            remarks += collisions(path, texts["1"], texts["2"], texts["3"]) or [f"{path}: git cannot merge it"]
        elif "2" not in texts:
            remarks.append(f"{path}, hunk 1: found no such file in the new release")
        elif "1" not in texts:
            remarks.append(f"{path}, hunk 1, line 1: found a file of that name in the new release, wanted none")
        else:
            remarks.append(f"{path}: found in the new release with changes, wanted as it was, to remove it")
    return tuple(remarks)


def _changes(before: list[str], after: list[str]) -> list[tuple[int, int, int, int]]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [opcode[1:] for opcode in matcher.get_opcodes() if opcode[0] != "equal"]


def _quote(lines: list[str]) -> str:
    text = lines[0].strip() if lines else ""
    more = f" and {len(lines) - 1} lines more" if len(lines) > 1 else ""
    return f"{text[:80]!r}{more}" if lines else "nothing"
