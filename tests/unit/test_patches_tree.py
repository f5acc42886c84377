"""Patches and the git tree in which they are edited are two forms of one thing."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import patch_stack
import patches_tree
import pytest
import yaml
from octoserve import patches

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    site = patch_stack.install(tmp_path / "unpacked")
    made = []
    for name in patch_stack.VERSIONS:
        wheel = tmp_path / f"{name}-{patch_stack.VERSIONS[name]}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in sorted(site.rglob("*")):
                if path.is_file() and path.relative_to(site).parts[0].startswith(name):
                    archive.write(path, path.relative_to(site))
        made.append(wheel)
    return made


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    folder = patch_stack.write_series(tmp_path / "stack")
    document = yaml.safe_load((folder / "series.yml").read_text())
    entries = [
        {**entry, "files": {path: patches.FileHashes(**hashes) for path, hashes in entry["files"].items()}}
        for entry in document["patches"]
    ]
    (folder / "series.yml").write_text(patches_tree.to_series(document["builds"], entries))
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def git(tree: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Developer", "-c", "user.email=developer@localhost"]
    command = ["git", "-C", str(tree), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_import_and_export_round_trip_without_a_byte_of_change(stack: Path, wheels: list[Path], tmp_path: Path) -> None:
    before = contents(stack)
    tree = tmp_path / "tree"
    assert patches_tree.import_series(stack, tree, wheels) == 3
    assert git(tree, "log", "--reverse", "--format=%s", "released..").splitlines() == [
        step[1].split("\n")[0] for step in patch_stack.STEPS
    ]
    for path in stack.glob("*.patch"):
        path.write_text("damaged")
    assert patches_tree.export_series(stack, tree) == 3
    assert contents(stack) == before


def test_the_reference_stack_is_in_the_form_that_export_writes() -> None:
    for folder in sorted((ROOT / "files/patches").iterdir()):
        series = patches.load_series(folder)
        document = yaml.safe_load((folder / "series.yml").read_text())
        entries = [
            {
                "file": patch.file,
                "distribution": entry["distribution"],
                "version": patch.version,
                "proof": patch.proof,
                "files": patch.hashes,
            }
            for patch, entry in zip(series.patches, document["patches"])
        ]
        assert patches_tree.to_series(document.get("builds") or {}, entries) == (folder / "series.yml").read_text()
        for number, patch in enumerate(series.patches, 1):
            assert patch.file == patches_tree.to_name(number, patch.headers)
            message = patches_tree.to_message(patch.headers)
            assert patches_tree.to_headers(message, patch.file) == patch.headers
            head, _, diffs = (folder / patch.file).read_text().partition("---\n--- ")
            assert patches_tree.to_patch(patch.headers, f"--- {diffs}") == f"{head}---\n--- {diffs}"


def test_an_edit_and_a_new_commit_are_exported(stack: Path, wheels: list[Path], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    patches_tree.import_series(stack, tree, wheels)
    (tree / "plugin/load.py").write_text("names: list[str] = []\n")
    git(tree, "commit", "--all", "--amend", "--no-edit")
    (tree / "plugin/more.py").write_text("more = 1\n")
    git(tree, "add", "plugin/more.py")
    fields = "Origin: vendor\nForwarded: no\nLast-Update: 2026-12-01\nApplies-To: plugin 0.5\nProof: cuda"
    git(tree, "commit", "-m", f"Add more\n\nBecause.\n\n{fields}")
    assert patches_tree.export_series(stack, tree) == 4
    site = patch_stack.install(tmp_path / "site")
    series = patches.load_series(stack)
    patches.write(patches.plan(series, site), site)
    assert (site / "plugin/load.py").read_text() == "names: list[str] = []\n"
    assert (site / "plugin/more.py").read_text() == "more = 1\n"
    assert series.patches[3].headers["Description"] == "Add more\nBecause."


def test_a_commit_without_its_fields_and_an_uncommitted_edit_are_refused(
    stack: Path, wheels: list[Path], tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    before = contents(stack)
    patches_tree.import_series(stack, tree, wheels)
    (tree / "plugin/load.py").write_text("names = ()\n")
    with pytest.raises(patches_tree.TreeError, match="in no commit"):
        patches_tree.export_series(stack, tree)
    git(tree, "commit", "--all", "-m", "Try something")
    with pytest.raises(patches.PatchError, match="DEP-3 fields missing"):
        patches_tree.export_series(stack, tree)
    assert contents(stack) == before


def test_a_tree_is_not_overwritten(stack: Path, wheels: list[Path], tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with pytest.raises(patches_tree.TreeError, match="exists; export or remove it first"):
        patches_tree.import_series(stack, tmp_path / "tree", wheels)
