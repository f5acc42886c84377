"""A patched copy of the distributions that a series touches, laid over an installed stack.

The copy holds only their packages, as hard links where the file system has them (the patch machinery
replaces files and never writes into them). With it first in PYTHONPATH, the stack's interpreter runs patched
code; the stack itself is not changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octoserve import patches


@dataclass(frozen=True)
class Edit:
    """A text in one file of the patched stack that a mutation replaces by another."""

    file: str
    old: str
    new: str


def build(target: Path, site_packages: Path, series: patches.Series, edits: Iterable[Edit] = ()) -> None:
    """Make the copy at an empty place, whole or not at all. Raises PatchError, and ValueError for an edit."""
    patches.check_versions(series, site_packages)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for package in sorted({path.split("/")[0] for path in series.paths()}):
        shutil.copytree(site_packages / package, partial / package, copy_function=_link)
    patches.write(patches.plan(series, partial), partial)
    for edit in edits:
        _replace(partial / edit.file, edit)
    partial.rename(target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _replace(path: Path, edit: Edit) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(edit.old) != 1:
        raise ValueError(
            f"{edit.file}: found {text.count(edit.old)} times {edit.old!r}, wanted one; renew the mutation"
        )
    fresh = path.with_name(f".{path.name}.edited")
    fresh.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    fresh.replace(path)
