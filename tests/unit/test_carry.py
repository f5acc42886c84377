"""Each patch of a series ends on a new release as applied, absorbed or in conflict, and the strict applier agrees."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import carry
import patch_stack
import patches_tree
import pytest
import stack_wheels
from octoserve import patches

CORE = patch_stack.RELEASED["engine/core.py"] or ""
UTIL = patch_stack.RELEASED["engine/util.py"] or ""


def wheels(folder: Path, version: str, **changes: str | None) -> list[Path]:
    """Wheels of a release of `engine` and of the plugin; `changes` are texts by module, None for a lost one."""
    folder.mkdir()
    files: dict[str, str | None] = {**patch_stack.RELEASED}
    files.update((f"engine/{module}.py", text) for module, text in changes.items())
    made = []
    for name, number in (("engine", version), ("plugin", "0.5")):
        made.append(folder / f"{name}-{number}-py3-none-any.whl")
        with zipfile.ZipFile(made[-1], "w") as archive:
            archive.writestr(f"{name}-{number}.dist-info/METADATA", f"Name: {name}\nVersion: {number}\n")
            for path, text in files.items():
                if path.startswith(name) and text is not None:
                    archive.writestr(path, text)
    return made


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    return patch_stack.write_series(tmp_path / "stack")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The series of three patches on engine 1.2.0."""
    folder = tmp_path_factory.mktemp("imported")
    series = patch_stack.write_series(folder / "stack")
    patches_tree.import_series(series, folder / "tree", wheels(folder / "old", "1.2.0"))
    return folder / "tree"


@pytest.fixture
def tree(imported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported, tmp_path / "tree"))


def carried(stack: Path, tree: Path, tmp_path: Path, **changes: str | None) -> list[carry.Outcome]:
    """Carry to engine 1.3.0 with these changes, export, and apply the new series to it as a deploy does."""
    made = wheels(tmp_path / "new", "1.3.0", **changes)
    series = patches.load_series(stack)
    outcomes = carry.carry(tree, series, made, {"engine": "1.3.0", "plugin": "0.5"}, "engine-1.2.0")
    patches_tree.export_series(stack, tree)
    plan = stack_wheels.plan(patches.load_series(stack), made)
    assert all(plan.pending.values())
    return outcomes


def texts_after(stack: Path, tmp_path: Path) -> dict[str, str | None]:
    with_series = tmp_path / "site"
    stack_wheels.unpack(sorted((tmp_path / "new").iterdir()), with_series)
    return patches.plan(patches.load_series(stack), with_series).after


def test_an_unchanged_release_takes_every_patch_as_it_is(stack: Path, tree: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_text() for path in stack.glob("*.patch")}
    outcomes = carried(stack, tree, tmp_path)
    assert [(outcome.verdict, outcome.remarks) for outcome in outcomes] == [(carry.APPLIES, ())] * 3
    after = {path.name: path.read_text().replace("engine 1.3.0", "engine 1.2.0") for path in stack.glob("*.patch")}
    assert after == before


def test_lines_that_moved_are_followed(stack: Path, tree: Path, tmp_path: Path) -> None:
    outcomes = carried(stack, tree, tmp_path, core="# one\n# two\n" + CORE)
    assert outcomes[1].remarks == ("engine/core.py moved by +2 lines",)
    assert texts_after(stack, tmp_path)["engine/core.py"] == "# one\n# two\n" + CORE.replace("= 30\n", "= 31\n")


def test_other_lines_around_a_change_are_taken_over(stack: Path, tree: Path, tmp_path: Path) -> None:
    outcomes = carried(stack, tree, tmp_path, core=CORE.replace("= 28\n", "= 280\n"))
    assert (outcomes[1].verdict, outcomes[1].remarks) == (carry.APPLIES, ("engine/core.py rewritten",))
    wanted = CORE.replace("= 28\n", "= 280\n").replace("= 30\n", "= 31\n")
    assert texts_after(stack, tmp_path)["engine/core.py"] == wanted


def test_what_upstream_has_is_left_out(stack: Path, tree: Path, tmp_path: Path) -> None:
    outcomes = carried(stack, tree, tmp_path, util="def half(x):\n    return x / 2\n", new="made = True\n")
    assert [outcome.verdict for outcome in outcomes] == [carry.ABSORBED, carry.APPLIES, carry.APPLIES]
    assert len(patches.load_series(stack).patches) == 2


def test_what_upstream_has_in_part_shrinks(stack: Path, tree: Path, tmp_path: Path) -> None:
    outcomes = carried(stack, tree, tmp_path, util="def half(x):\n    return x / 2\n")
    assert outcomes[0] == carry.Outcome(
        "0001-halve-by-two.patch", carry.APPLIES, ("engine/util.py is left as it is upstream",)
    )
    assert list(patches.load_series(stack).patches[0].hashes) == ["engine/new.py"]


def test_a_conflict_names_file_hunk_line_and_text(stack: Path, tree: Path, tmp_path: Path) -> None:
    outcomes = carried(stack, tree, tmp_path, util="import math\n\n\ndef half(x):\n    return x * 0.5\n")
    assert outcomes[0] == carry.Outcome(
        "0001-halve-by-two.patch",
        carry.CONFLICTS,
        ("engine/util.py, hunk 1, line 5: found 'return x * 0.5', wanted 'return x / 3'",),
    )
    # The second builds on the first's new file.
    assert outcomes[1].verdict == carry.CONFLICTS
    assert "engine/new.py" in outcomes[1].remarks[0]
    assert [patch.file for patch in patches.load_series(stack).patches] == ["0001-keep-the-names-in-order.patch"]


def test_the_hunk_is_the_one_that_conflicts() -> None:
    base = CORE
    theirs = base.replace("= 5\n", "= 50\n").replace("= 30\n", "= 31\n")
    ours = base.replace("step_12 = 12\n", "").replace("= 30\n", "= thirty\n")
    assert carry.collisions("core.py", base, ours, theirs) == [
        "core.py, hunk 2, line 29: found 'step_30 = thirty', wanted 'step_30 = 30'"
    ]


def test_the_same_change_on_both_sides_is_no_collision() -> None:
    changed = CORE.replace("= 30\n", "= 31\n")
    assert carry.collisions("core.py", CORE, changed, changed) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"util": None}, "engine/util.py, hunk 1: found no such file in the new release"),
        ({"new": "other = 1\n"}, "engine/new.py, hunk 1, line 1: found a file of that name in the new release"),
    ],
)
def test_a_file_that_is_gone_or_there_already_is_named(
    stack: Path, tree: Path, tmp_path: Path, changes: dict[str, str | None], found: str
) -> None:
    outcomes = carried(stack, tree, tmp_path, **changes)
    assert outcomes[0].verdict == carry.CONFLICTS
    assert outcomes[0].remarks[0].startswith(found)


def test_a_conflict_is_mended_in_the_tree(stack: Path, tree: Path, tmp_path: Path) -> None:
    carried(stack, tree, tmp_path, core=CORE.replace("= 30\n", "= thirty\n"))
    identity = ["-c", "user.name=Developer", "-c", "user.email=developer@localhost"]
    branch = f"{carry.LEFT_OUT}/0002-count-step-30-right"
    picked = subprocess.run(
        ["git", "-C", str(tree), *identity, "cherry-pick", branch], capture_output=True, check=False
    )
    assert picked.returncode == 1, "the conflict is still there for the contributor"
    (tree / "engine/core.py").write_text(CORE.replace("= 30\n", "= thirty_one\n"))
    for command in (["add", "--all"], ["-c", "core.editor=true", "cherry-pick", "--continue"]):
        subprocess.run(["git", "-C", str(tree), *identity, *command], capture_output=True, check=True)
    patches_tree.export_series(stack, tree)
    plan = stack_wheels.plan(patches.load_series(stack), sorted((tmp_path / "new").iterdir()))
    assert plan.after["engine/core.py"] == CORE.replace("= 30\n", "= thirty_one\n")
