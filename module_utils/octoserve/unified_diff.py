"""Unified diffs, read and applied strictly: no fuzz, no search for a place, no guessing.

Format: GNU diffutils manual, "Detailed Description of Unified Format", with git's ``a/`` and ``b/`` prefixes.
Pure functions on text; lines end at ``\\n`` only, so form feeds and Unicode separators stay inside a line.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

CONTEXT = 3
ABSENT = "/dev/null"
NO_NEWLINE = "\\ No newline at end of file"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@[^\n]*")


class DiffError(ValueError):
    """A diff that cannot be read, or that does not fit the text."""


@dataclass(frozen=True)
class Hunk:
    """One change: ``old`` replaces the lines from ``old_start`` (from 1) by ``new``; lines keep their ``\\n``."""

    old_start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    """The changes of one file; ``creates`` and ``deletes`` say which side is absent."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False


def split_lines(text: str) -> list[str]:
    """Lines with their ``\\n``; only the last may lack it."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def parse(text: str, name: str = "diff") -> tuple[str, list[FileDiff]]:
    """Return what stands before the first file, and the files' changes. Raises DiffError with the line."""
    lines = split_lines(text)
    start = next((n for n, line in enumerate(lines) if line.startswith("--- ") and _is_header(lines, n)), None)
    if start is None:
        raise DiffError(f"{name}: found no '--- a/…' line, wanted a unified diff")
    reader = _Reader(lines, start, name)
    files: list[FileDiff] = []
    while not reader.at_end():
        files.append(_read_file(reader))
    return "".join(lines[:start]), files


def apply(diff: FileDiff, text: str | None, name: str = "") -> str | None:
    """Return the text after the change; None stands for a file that is absent. Raises DiffError with the line."""
    where = name or diff.path
    if diff.creates != (text is None):
        raise DiffError(
            f"{where}: the file exists, but the patch creates it"
            if diff.creates
            else f"{where}: the file to patch is missing"
        )
    old = split_lines(text or "")
    new: list[str] = []
    done = 0
    for hunk in diff.hunks:
        # A hunk without old lines names the line that it follows.
        at = hunk.old_start - 1 if hunk.old else hunk.old_start
        _match(hunk, old, at, where)
        new += old[done:at] + list(hunk.new)
        done = at + len(hunk.old)
    new += old[done:]
    if diff.deletes:
        if new:
            raise DiffError(f"{where}:1: the patch deletes the file, but {len(new)} lines are left over")
        return None
    return "".join(new)


def reverse(diff: FileDiff) -> FileDiff:
    """Return the change that undoes ``diff``."""
    hunks = []
    shift = 0
    for hunk in diff.hunks:
        # A side without lines names the line before it, the other side its own first line.
        start = hunk.old_start + shift + (not hunk.old) - (not hunk.new)
        hunks.append(Hunk(start, hunk.new, hunk.old))
        shift += len(hunk.new) - len(hunk.old)
    return FileDiff(diff.path, tuple(hunks), creates=diff.deletes, deletes=diff.creates)


def make(path: str, old: str | None, new: str | None) -> str:
    """Render the change of one file, with three lines of context; empty where nothing changes."""
    if old == new:
        return ""
    before, after = split_lines(old or ""), split_lines(new or "")
    # difflib's own unified_diff takes frequent lines for junk, which makes long files differ more than they do.
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    out = [f"--- {ABSENT if old is None else 'a/' + path}\n", f"+++ {ABSENT if new is None else 'b/' + path}\n"]
    for group in matcher.get_grouped_opcodes(CONTEXT):
        first, last = group[0], group[-1]
        out.append(f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                out += [_line(" ", line) for line in before[i1:i2]]
                continue
            out += [_line("-", line) for line in before[i1:i2]]
            out += [_line("+", line) for line in after[j1:j2]]
    return "".join(out)


def _range(start: int, stop: int) -> str:
    length = stop - start
    return f"{start + 1 if length else start},{length}"


def _line(mark: str, line: str) -> str:
    return mark + line if line.endswith("\n") else f"{mark}{line}\n{NO_NEWLINE}\n"


def _is_header(lines: list[str], number: int) -> bool:
    return number + 1 < len(lines) and lines[number + 1].startswith("+++ ")


def _match(hunk: Hunk, lines: list[str], at: int, where: str) -> None:
    for offset, wanted in enumerate(hunk.old):
        found = lines[at + offset] if at + offset < len(lines) else None
        if found != wanted:
            raise DiffError(
                f"{where}:{at + offset + 1}: found {'the end of the file' if found is None else repr(found)}, "
                f"wanted {wanted!r}"
            )
    if at > len(lines):
        raise DiffError(f"{where}:{len(lines)}: found the end of the file, wanted line {at}")


class _Reader:
    """Lines of a diff, with the number of the next one for messages."""

    def __init__(self, lines: list[str], position: int, name: str) -> None:
        self.lines, self.position, self.name = lines, position, name

    def at_end(self) -> bool:
        return self.position >= len(self.lines)

    def peek(self) -> str:
        return "" if self.at_end() else self.lines[self.position]

    def take(self, wanted: str) -> str:
        if self.at_end():
            raise self.error(f"the diff ends here, wanted {wanted}")
        self.position += 1
        return self.lines[self.position - 1]

    def error(self, message: str) -> DiffError:
        return DiffError(f"{self.name}:{min(self.position + 1, len(self.lines))}: {message}")


def _read_file(reader: _Reader) -> FileDiff:
    line = reader.peek()
    if not (line.startswith("--- ") and _is_header(reader.lines, reader.position)):
        raise reader.error(f"found {line!r}, wanted the next hunk or the next file")
    old = reader.take("'--- a/…'")[4:].rstrip("\n")
    new = reader.take("'+++ b/…'")[4:].rstrip("\n")
    creates, deletes = old == ABSENT, new == ABSENT
    if (creates and deletes) or not ((creates or old.startswith("a/")) and (deletes or new.startswith("b/"))):
        raise reader.error(f"found the paths {old!r} and {new!r}, wanted a/… and b/…, or {ABSENT} for one")
    path = (old if deletes else new)[2:]
    if not (creates or deletes) and old[2:] != path:
        raise reader.error(f"the patch renames {old[2:]} to {path}; write it as a deletion and a creation")
    hunks: list[Hunk] = []
    shift = 0
    end = 0
    while reader.peek().startswith("@@"):
        hunk, new_start = _read_hunk(reader)
        at = hunk.old_start - 1 if hunk.old else hunk.old_start
        if at < end:
            raise reader.error("the hunk overlaps the one before it")
        if new_start - (1 if hunk.new else 0) != at + shift:
            raise reader.error("the new line number of the hunk does not follow from the hunks before it")
        end = at + len(hunk.old)
        shift += len(hunk.new) - len(hunk.old)
        hunks.append(hunk)
    if not hunks:
        raise reader.error(f"found {reader.peek()!r}, wanted a hunk '@@ -… +… @@' of {path}")
    return FileDiff(path, tuple(hunks), creates, deletes)


def _read_hunk(reader: _Reader) -> tuple[Hunk, int]:
    header = _HUNK.fullmatch(reader.peek().rstrip("\n"))
    if header is None:
        raise reader.error(f"found {reader.peek()!r}, wanted '@@ -start,count +start,count @@'")
    reader.take("a hunk")
    start, old_left, new_start, new_left = (int(header[group] or 1) for group in (1, 2, 3, 4))
    old: list[str] = []
    new: list[str] = []
    while old_left or new_left or reader.peek().startswith("\\"):
        line = reader.take(f"{old_left} old and {new_left} new lines more")
        mark, content = line[:1], line[1:]
        if not line.endswith("\n"):
            raise reader.error("the diff is cut off inside a line")
        if line.rstrip("\n") == NO_NEWLINE:
            _strip_newline(reader, old, new)
            continue
        if mark not in " -+" or (mark in " -" and not old_left) or (mark in " +" and not new_left):
            raise reader.error(f"found {line!r}, wanted {old_left} old and {new_left} new lines more")
        if mark in " -":
            old.append(content)
            old_left -= 1
        if mark in " +":
            new.append(content)
            new_left -= 1
    return Hunk(start, tuple(old), tuple(new)), new_start


def _strip_newline(reader: _Reader, old: list[str], new: list[str]) -> None:
    """The line before the mark has no ``\\n``, on each side that it belongs to."""
    mark = reader.lines[reader.position - 2][:1]
    sides = [side for side, marks in ((old, " -"), (new, " +")) if mark in marks]
    if not sides or any(not side for side in sides):
        raise reader.error(f"{NO_NEWLINE!r} follows no line")
    for side in sides:
        side[-1] = side[-1].rstrip("\n")
