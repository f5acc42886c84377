"""A stack's folder is read as a whole, and a release is named by all that goes into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from octoserve import stack
from octoserve.stack import StackError

ROOT = Path(__file__).parents[2]
STACKS = sorted(path.parent for path in ROOT.glob("files/patches/*/stack.yml"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "engine-1.2"
    folder.mkdir()
    for name in ("cpu.txt", "cuda.txt", "series.yml", "0001-one.patch"):
        (folder / name).write_text(f"{name}\n")
    return folder


def document(**changes: Any) -> dict[str, Any]:
    cpu = {"python": "3.11", "requirements": "cpu.txt", "imports": ["engine"], **changes}
    return {"name": "engine-1.2", "variants": {"cpu": cpu, "cuda": {"python": "3.12", "requirements": "cuda.txt"}}}


def test_a_variant_is_read(folder: Path) -> None:
    assert stack.variant(folder, document(extra_index_urls=["https://example.org/simple"]), "cpu") == stack.Variant(
        stack="engine-1.2",
        name="cpu",
        python="3.11",
        lock=folder / "cpu.txt",
        extra_index_urls=("https://example.org/simple",),
        imports=("engine",),
    )
    cuda = stack.variant(folder, document(), "cuda")
    assert (cuda.python, cuda.extra_index_urls, cuda.imports) == ("3.12", (), ())


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (None, "NoneType"),
        ({"name": "engine-1.3"}, "'engine-1.3', wanted the folder's, 'engine-1.2'"),
        ({"name": "engine-1.2"}, "no variant 'cpu'; it has: none"),
        ({"name": "engine-1.2", "variants": {"cuda": {}, 12: {}}}, "no variant 'cpu'; it has: cuda, 12"),
        ({"name": "engine-1.2", "variants": {"cpu": None}}, "cpu is None, wanted a mapping"),
        (document(pyhton="3.11"), "pyhton"),
        (document(python=3.11), "python is 3.11, wanted text"),
        (document(requirements=None), "requirements is None, wanted text"),
        (document(requirements="gone.txt"), "gone.txt, which is not there; run: make lock"),
        (document(imports="engine"), "imports is 'engine', wanted a list of text"),
        (document(extra_index_urls="https://example.org"), "extra_index_urls is 'https://example.org', wanted a list"),
        (document(imports=[1]), r"imports is \[1\], wanted a list of text"),
    ],
)
def test_a_mistake_is_named(folder: Path, found: Any, named: str) -> None:
    with pytest.raises(StackError, match=named) as caught:
        stack.variant(folder, found, "cpu")
    assert str(folder / "stack.yml") in str(caught.value)


@pytest.mark.parametrize("changed", ["cpu.txt", "series.yml", "0001-one.patch", "0002-two.patch"])
def test_any_change_makes_another_release(folder: Path, changed: str) -> None:
    before = stack.release_name(stack.variant(folder, document(), "cpu"))
    (folder / changed).write_text("changed\n")
    after = stack.release_name(stack.variant(folder, document(), "cpu"))
    assert before.startswith("engine-1.2-cpu-")
    assert after.startswith("engine-1.2-cpu-")
    assert before != after


def test_variants_and_pythons_have_releases_of_their_own(folder: Path) -> None:
    (folder / "cuda.txt").write_text((folder / "cpu.txt").read_text())
    found = [(document(), "cpu"), (document(), "cuda"), (document(python="3.12"), "cpu")]
    assert len({stack.release_name(stack.variant(folder, *each)) for each in found}) == 3


def test_what_does_not_go_in_changes_no_name(folder: Path) -> None:
    before = stack.release_name(stack.variant(folder, document(), "cpu"))
    (folder / "cuda.txt").write_text("another lock\n")
    (folder / "README.md").write_text("words\n")
    assert stack.release_name(stack.variant(folder, document(), "cpu")) == before


def test_there_are_stacks() -> None:
    assert STACKS


@pytest.mark.parametrize("path", STACKS, ids=lambda path: str(path.name))
def test_the_projects_own_stacks_are_whole(path: Path) -> None:
    found = yaml.safe_load((path / "stack.yml").read_text())
    for name in found["variants"]:
        variant = stack.variant(path, found, name)
        assert variant.imports, "a release that imports nothing proves nothing"
        assert stack.release_name(variant).startswith(f"{path.name}-{name}-")
