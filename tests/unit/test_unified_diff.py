"""Unified diffs: what is made can be read and applied; what does not fit is refused with its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octoserve import unified_diff
from octoserve.unified_diff import DiffError

# Few different lines, so that hunks repeat, touch and overlap in context; separators that are not line ends.
LINES = st.lists(st.sampled_from(["a", "b", "", "-- c", "++ d", "@@ e", "\f", "\u2028", " x\r"]), max_size=30)
TEXTS = st.tuples(LINES, st.booleans()).map(lambda made: "\n".join(made[0]) + ("\n" if made[1] and made[0] else ""))
OLD = "".join(f"line {number}\n" for number in range(1, 21))
NEW = OLD.replace("line 4\n", "line four\n").replace("line 15\n", "")


def one(text: str) -> unified_diff.FileDiff:
    _, (diff,) = unified_diff.parse(text)
    return diff


@given(TEXTS, TEXTS)
def test_a_made_diff_leads_from_the_old_text_to_the_new_and_back(old: str, new: str) -> None:
    text = unified_diff.make("p", old, new)
    if old == new:
        assert text == ""
        return
    diff = one(text)
    assert unified_diff.apply(diff, old) == new
    assert unified_diff.apply(unified_diff.reverse(diff), new) == old


@given(TEXTS.filter(bool))
def test_files_are_created_and_deleted(text: str) -> None:
    created, deleted = one(unified_diff.make("p", None, text)), one(unified_diff.make("p", text, None))
    assert unified_diff.apply(created, None) == text
    assert unified_diff.apply(deleted, text) is None
    assert unified_diff.reverse(created) == deleted


@given(TEXTS, TEXTS, st.data())
def test_a_truncated_diff_never_applies_to_something_else(old: str, new: str, data: st.DataObject) -> None:
    text = unified_diff.make("p", old, new)
    cut = text[: data.draw(st.integers(0, max(len(text) - 1, 0)))]
    try:
        diff = one(cut)
    except (DiffError, ValueError):
        return
    # What still parses ends between two hunks, or before the mark that the last line has no newline.
    assert text.startswith(cut)
    assert diff.hunks[:-1] == one(text).hunks[: len(diff.hunks) - 1]


def test_the_preamble_and_several_files_are_kept_apart() -> None:
    text = "Description: x\n---\n" + unified_diff.make("a.py", "1\n", "2\n") + unified_diff.make("b.py", None, "3\n")
    head, diffs = unified_diff.parse(text)
    assert head == "Description: x\n---\n"
    assert [(diff.path, diff.creates) for diff in diffs] == [("a.py", False), ("b.py", True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no '--- a/…' line"),
        ("--- a/p\n+++ b/p\n", "wanted a hunk"),
        ("--- p\n+++ p\n@@ -1 +1 @@\n-a\n+b\n", "wanted a/… and b/…"),
        ("--- a/p\n+++ b/q\n@@ -1 +1 @@\n-a\n+b\n", "renames p to q"),
        ("--- a/p\n+++ b/p\n@@ -1,2 +1 @@\n-a\n+b\n", "ends here, wanted 1 old and 0 new lines more"),
        ("--- a/p\n+++ b/p\n@@ -1 +1 @@\n-a\n+b", "cut off inside a line"),
        ("--- a/p\n+++ b/p\n@@ -1 +1 @@\n-a\n-b\n+b\n", "wanted 0 old and 1 new"),
        ("--- a/p\n+++ b/p\n@@ -1 +1 @@\n-a\n+b\nnoise\n", "wanted the next hunk or the next file"),
        ("--- a/p\n+++ b/p\n@@ -5 +5 @@\n-a\n+b\n@@ -4 +4 @@\n-a\n+b\n", "overlaps"),
        ("--- a/p\n+++ b/p\n@@ -5 +7 @@\n-a\n+b\n", "does not follow"),
        ("--- a/p\n+++ b/p\n@@ -x +1 @@\n-a\n+b\n", "wanted '@@"),
    ],
)
def test_a_damaged_diff_is_refused(text: str, message: str) -> None:
    with pytest.raises(DiffError, match=message):
        unified_diff.parse(text)


def test_a_shifted_text_is_refused_where_patch_would_search() -> None:
    diff = one(unified_diff.make("p.py", OLD, NEW))
    with pytest.raises(DiffError, match=r"p\.py:1: found 'line 0\\n', wanted 'line 1\\n'"):
        unified_diff.apply(diff, "line 0\n" + OLD)


def test_changed_context_is_refused_where_patch_would_be_fuzzy() -> None:
    diff = one(unified_diff.make("p.py", OLD, NEW))
    with pytest.raises(DiffError, match=r"p\.py:2: found 'line two\\n', wanted 'line 2\\n'"):
        unified_diff.apply(diff, OLD.replace("line 2\n", "line two\n"))


def test_a_text_that_ends_early_is_refused() -> None:
    diff = one(unified_diff.make("p.py", OLD, NEW))
    with pytest.raises(DiffError, match=r"p\.py:17: found the end of the file"):
        unified_diff.apply(diff, "".join(OLD.splitlines(True)[:16]))


def test_a_file_that_should_not_be_there_or_should_is_named() -> None:
    with pytest.raises(DiffError, match="the patch creates it"):
        unified_diff.apply(one(unified_diff.make("p", None, "1\n")), "2\n")
    with pytest.raises(DiffError, match="is missing"):
        unified_diff.apply(one(unified_diff.make("p", "1\n", "2\n")), None)
    with pytest.raises(DiffError, match="1 lines are left over"):
        unified_diff.apply(one(unified_diff.make("p", "1\n", None)), "1\n2\n")
