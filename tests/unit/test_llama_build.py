"""The tool is built from an archive shaped like llama.cpp's, or the one that was there stays."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from octoserve import job, llama_build
from octoserve.digest import sha256_file

PROGRAMS = ("cmake", "ninja", "cc")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"cannot build here, not found: {', '.join(MISSING)}")

#: As llama.cpp has it: the tool in a folder of its own, programs in build/bin, options that it knows.
PROJECT = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.14)
project(llama C)
option(LLAMA_BUILD_TESTS "" ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_subdirectory(tools/gguf-split)
if(LLAMA_BUILD_TESTS)
  message(FATAL_ERROR "the tests are not wanted")
endif()
add_executable(not-wanted tools/not-wanted.c)
""",
    "tools/gguf-split/CMakeLists.txt": "add_executable(llama-gguf-split gguf-split.c)\n",
    "tools/gguf-split/gguf-split.c": '#include <stdio.h>\nint main(void) { puts("version: 7"); return 0; }\n',
    "tools/not-wanted.c": "#error this file is not needed for the tool\n",
}


def archive_of(folder: Path, files: dict[str, str], below: str = "llama.cpp") -> Path:
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name, text in files.items():
        path = tree / below / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = folder / "source.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        tar.add(tree, arcname=".")
    return made


def build(archive: Path, path: Path, **changes: Any) -> dict[str, Any]:
    """Run the worker as its unit does; returns the state that it wrote."""
    spec = {"archive": str(archive), "path": str(path), "sha256": sha256_file(archive), **changes}
    state, secrets, order = (archive.parent / name for name in ("state.json", "secrets.json", "order.json"))
    state.write_text("{}")
    secrets.write_text("{}")
    order.write_text(json.dumps({"spec": spec, "state": str(state), "secrets": str(secrets)}))
    job.main(llama_build.work, [str(order)])
    return job.read_state(state)


def output(tool: Path) -> str:
    return subprocess.run([str(tool)], capture_output=True, text=True, check=True).stdout


@needs_compiler
def test_the_tool_is_built_and_nothing_else(tmp_path: Path) -> None:
    """Also from a source that lies deeper, as in the sdist that carries llama.cpp."""
    archive, path = archive_of(tmp_path, PROJECT, "package-1.0/vendor/llama.cpp"), tmp_path / "llama.cpp/1.0"
    assert llama_build.built_from(path) == ""
    state = build(archive, path)
    assert state["state"] == "done", state["error"]
    assert state["result"] == {"version": "version: 7"}
    assert output(path / "bin" / llama_build.TOOL) == "version: 7\n"
    assert llama_build.built_from(path) == sha256_file(archive)
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == [
        "bin/llama-gguf-split",
        "source.sha256",
    ]
    assert [file.name for file in path.parent.iterdir()] == ["1.0"]


@needs_compiler
def test_a_failed_build_says_why_and_keeps_the_tool_that_was(tmp_path: Path) -> None:
    path = tmp_path / "llama.cpp/1.0"
    first = archive_of(tmp_path, PROJECT)
    build(first, path)
    digest = sha256_file(first)
    broken = archive_of(tmp_path, {**PROJECT, "tools/gguf-split/gguf-split.c": "int main(void) { return wrong; }\n"})
    state = build(broken, path)
    assert state["state"] == "failed"
    assert "wrong" in state["error"]
    assert output(path / "bin" / llama_build.TOOL) == "version: 7\n"
    assert llama_build.built_from(path) == digest
    assert [file.name for file in path.parent.iterdir()] == ["1.0"]


def test_another_archive_is_refused(tmp_path: Path) -> None:
    """Else the tool would carry another digest than was asked for, and be built again in every run."""
    archive = archive_of(tmp_path, PROJECT)
    state = build(archive, tmp_path / "1.0", sha256="0" * 64)
    assert state["state"] == "failed"
    assert f"sha256 is {sha256_file(archive)}, wanted {'0' * 64}" in state["error"]


def test_a_source_without_the_tool_is_named(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, {"README.md": "another project\n"})
    state = build(archive, tmp_path / "1.0")
    assert state["state"] == "failed"
    assert "tools/gguf-split" in state["error"]
    assert str(archive) in state["error"]
    assert not (tmp_path / ".1.0.partial").exists()


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, PROJECT)
    archive.write_bytes(archive.read_bytes()[:100])
    state = build(archive, tmp_path / "1.0")
    assert state["state"] == "failed"
    assert "tar --extract ended with" in state["error"]


def test_a_host_without_a_compiler_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar, gzip = shutil.which("tar"), shutil.which("gzip")
    assert tar and gzip
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in (tar, gzip):
        (programs / Path(program).name).symlink_to(program)
    monkeypatch.setenv("PATH", str(programs))
    state = build(archive_of(tmp_path, PROJECT), tmp_path / "1.0")
    assert "apt-get install cmake" in state["error"]


def test_a_stamp_without_the_tool_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / llama_build.STAMP).write_text("0" * 64)
    assert llama_build.built_from(tmp_path) == ""
