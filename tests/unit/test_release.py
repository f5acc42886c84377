"""A release is complete, patched and importable in its place, or it is not there at all."""

from __future__ import annotations

import hashlib
import json
import marshal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import patch_stack
import pytest
import tiny_wheels
import yaml
from octoserve import job, patches, release, release_worker, venv
from octoserve.release import Recipe, ReleaseError

UV = str(Path(sys.executable).with_name("uv"))
PYC_HEADER = 16


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The distributions of patch_stack, and PyYAML's Python files: a stack brings the YAML that reads its series."""
    folder = tmp_path_factory.mktemp("wheels")
    files: dict[str, dict[str, str]] = {"engine": {"engine/__init__.py": "__version__ = '1.2.0'\n"}, "plugin": {}}
    for path, text in patch_stack.RELEASED.items():
        if text is not None:
            files[path.split("/")[0]][path] = text
    reader = {f"yaml/{path.name}": path.read_text() for path in Path(yaml.__file__).parent.glob("*.py")}
    made = [tiny_wheels.wheel(folder, name, patch_stack.VERSIONS[name], files[name]) for name in files]
    return [*made, tiny_wheels.wheel(folder, "tiny_yaml", "1.0", reader)]


@pytest.fixture
def recipe(tmp_path: Path, wheels: list[Path]) -> Recipe:
    stack = patch_stack.write_series(tmp_path / "stack")
    source = venv.Source(tiny_wheels.lock(stack / "cpu.txt", wheels), tiny_wheels.pack(tmp_path / "w.tar", wheels))
    path = tmp_path / "releases/engine-1.2-cpu"
    return Recipe("engine-1.2-cpu", path, sys.executable, stack, source, ("engine", "engine.new"), UV)


def make(recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    phases: list[str] = []
    return release.make(recipe, phases.append), phases


def site_packages(recipe: Recipe) -> Path:
    return patches.site_packages_of(str(recipe.path / "bin/python"))


def beside(recipe: Recipe) -> list[str]:
    return sorted(path.name for path in recipe.path.parent.iterdir())


def test_a_release_is_complete_in_its_place(recipe: Recipe) -> None:
    record, phases = make(recipe)
    assert phases == ["install packages", "apply patches", "compile byte-code", "try the imports", "put in place"]
    assert release.read_record(recipe.path) == record
    assert record["versions"] == {"engine": "1.2.0", "engine.new": ""}
    assert record["patches"] == sorted(path.name for path in recipe.stack.glob("*.patch"))
    assert record["lock"] == hashlib.sha256(recipe.source.lock.read_bytes()).hexdigest()
    site = site_packages(recipe)
    assert {path: (site / path).read_text() for path in patch_stack.patched()} == patch_stack.patched()
    assert patches.verify(record["files"], site) == []
    assert beside(recipe) == [recipe.path.name]
    command = [str(recipe.path / "bin/python"), "-c", "import engine.util; print(engine.util.half(8))"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "4.0\n"


def test_its_byte_code_is_whole_and_names_its_place(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's user may not write it, and a traceback must not name a folder that is gone."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    make(recipe)
    sources = sorted(site_packages(recipe).rglob("*.py"))
    assert len(sources) > len(patch_stack.RELEASED)
    for path in sources:
        (compiled,) = path.parent.glob(f"__pycache__/{path.stem}.*.pyc")
        code = marshal.loads(compiled.read_bytes()[PYC_HEADER:])
        assert code.co_filename == str(path)


def test_a_complete_release_is_never_made_again(recipe: Recipe) -> None:
    """A controller that came late, or a job that was started again, must not pull it from under a service."""
    record, _ = make(recipe)
    kept = recipe.path.stat().st_ino
    again, phases = make(recipe)
    assert (again, phases) == (record, [])
    assert recipe.path.stat().st_ino == kept


def test_a_failing_import_leaves_no_release(recipe: Recipe) -> None:
    with pytest.raises(ReleaseError, match=r"engine\.absent"):
        make(replace(recipe, imports=("engine", "engine.absent")))
    assert release.read_record(recipe.path) == {}
    assert not recipe.path.exists()
    make(recipe)
    assert beside(recipe) == [recipe.path.name]


def test_a_patch_that_does_not_fit_leaves_no_release(recipe: Recipe, tmp_path: Path, wheels: list[Path]) -> None:
    other = tiny_wheels.wheel(tmp_path / "other", "plugin", "0.5", {"plugin/load.py": "names = dict()\n"})
    found = [wheels[0], other, wheels[2]]
    lock = tiny_wheels.lock(tmp_path / "other.txt", found)
    edited = replace(recipe, source=venv.Source(lock, tiny_wheels.pack(tmp_path / "other.tar", found)))
    with pytest.raises(patches.PatchError, match=r"plugin/load\.py"):
        make(edited)
    assert not recipe.path.exists()
    make(recipe)
    assert beside(recipe) == [recipe.path.name]


def test_a_wheel_that_is_not_there_leaves_no_release(recipe: Recipe, tmp_path: Path, wheels: list[Path]) -> None:
    source = replace(recipe.source, archive=tiny_wheels.pack(tmp_path / "less.tar", wheels[1:]))
    with pytest.raises(venv.VenvError, match="engine"):
        make(replace(recipe, source=source))
    assert not recipe.path.exists()


def test_what_a_killed_run_left_is_replaced(recipe: Recipe) -> None:
    for leftover in (recipe.path, recipe.path.with_name(f".{recipe.path.name}.partial")):
        (leftover / "bin").mkdir(parents=True)
        (leftover / "bin/python").write_text("half a file")
    assert release.read_record(recipe.path) == {}
    make(recipe)
    assert beside(recipe) == [recipe.path.name]
    assert (recipe.path / "bin/python").is_symlink()


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_record_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / release.RECORD).write_bytes(content)
    with pytest.raises(ReleaseError, match=r"is damaged.*remove"):
        release.read_record(tmp_path)


def run_worker(recipe: Recipe, folder: Path, **changes: Any) -> dict[str, Any]:
    """Run the worker as its unit does and return the state that it wrote."""
    spec = {
        "name": recipe.name,
        "path": str(recipe.path),
        "python": recipe.python,
        "stack": str(recipe.stack),
        "requirements": str(recipe.source.lock),
        "archive": str(recipe.source.archive),
        "extra_index_urls": [],
        "imports": list(recipe.imports),
        "uv": recipe.uv,
        **changes,
    }
    state, secrets, order = folder / "state.json", folder / "secrets.json", folder / "order.json"
    state.write_text("{}")
    secrets.write_text("{}")
    order.write_text(json.dumps({"spec": spec, "state": str(state), "secrets": str(secrets)}))
    job.main(release_worker.work, [str(order)])
    return job.read_state(state)


def test_the_worker_makes_what_its_spec_says(recipe: Recipe, tmp_path: Path) -> None:
    state = run_worker(recipe, tmp_path)
    assert state["state"] == "done"
    assert state["result"]["record"] == release.read_record(recipe.path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"imports": ["nowhere"]}, "No module named 'nowhere'"),
        ({"uv": "/nowhere/uv"}, "/nowhere/uv"),
        ({"archive": "/nowhere/wheels.tar"}, "/nowhere/wheels.tar"),
        ({"stack": "/nowhere/stack"}, "/nowhere/stack"),
    ],
)
def test_the_workers_errors_are_for_the_operator(
    recipe: Recipe, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    state = run_worker(recipe, tmp_path, **changes)
    assert state["state"] == "failed"
    assert named in state["error"]
    assert "a mistake in the worker" not in state["error"]
