"""Findings about what compiles kernels, with programs that are shell scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from octoserve import preflight_build
from octoserve.finding import CANNOT_SEE, ERROR, OK, WARNING

VERSION = "{}.{}".format(*sys.version_info[:2])


def program(path: Path, *lines: str) -> str:
    """A shell script of these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "wanted", "verdict"),
    [
        ("3.12", "3.12", OK),
        ("3.12", None, OK),
        ("3.11", "3.12", ERROR),
        ("3.10", None, ERROR),
        ("3.9", None, ERROR),  # as text it is more than 3.11
        ("not a version", "3.12", ERROR),
    ],
)
def test_python(tmp_path: Path, says: str, wanted: str | None, verdict: str) -> None:
    found = preflight_build.python(program(tmp_path / "python", f"echo {says}"), wanted)
    assert found.verdict == verdict
    assert ("octoserve_python" in found.mend) == (verdict == ERROR)


def test_the_python_of_the_tests_is_read() -> None:
    assert preflight_build.python(sys.executable, VERSION).measured == f"{sys.executable} is {VERSION}"


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    assert preflight_build.python(str(tmp_path / "python"), None).verdict == ERROR
    assert preflight_build.headers(str(tmp_path / "python")).verdict == CANNOT_SEE


def test_headers(tmp_path: Path) -> None:
    include = tmp_path / "include/python3.12"
    python = program(tmp_path / "python", f"echo {include}")
    found = preflight_build.headers(python)
    assert (found.verdict, found.measured) == (ERROR, f"no {include}/Python.h")
    assert "python3.12-dev" in found.mend
    include.mkdir(parents=True)
    (include / "Python.h").touch()
    assert preflight_build.headers(python).verdict == OK
    assert preflight_build.headers(program(tmp_path / "mute", "echo 3.12")).verdict == CANNOT_SEE


def test_compiler(tmp_path: Path) -> None:
    path, include = tmp_path / "bin", tmp_path / "include"
    program(path / "gcc", "echo 14.2.0")
    found = preflight_build.compiler(str(path), include)
    assert (found.verdict, found.measured) == (ERROR, f"missing: g++, {include}/stdio.h")
    program(path / "g++", "")
    include.mkdir()
    (include / "stdio.h").touch()
    found = preflight_build.compiler(str(path), include)
    assert (found.verdict, found.measured) == (OK, "gcc 14.2.0")
    (path / "gcc").unlink()
    assert preflight_build.compiler(str(path), include).measured == "missing: gcc"


def test_nvcc(tmp_path: Path) -> None:
    cuda = tmp_path / "cuda"

    def look(wanted: str | None = "13.0") -> tuple[str, str]:
        found = preflight_build.nvcc(wanted, str(tmp_path / "bin"), [cuda])
        return found.verdict, found.measured

    assert look() == (WARNING, f"not in the service's PATH nor below {cuda}")
    nvcc = program(cuda / "bin/nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    assert look() == (WARNING, f"{nvcc} of CUDA 13.0, without cuda_runtime.h")
    (cuda / "include").mkdir()
    (cuda / "include/cuda_runtime.h").touch()
    assert look() == (OK, f"{nvcc} of CUDA 13.0")
    assert look("12.10")[0] == OK
    assert look("13.2") == (WARNING, f"{nvcc} of CUDA 13.0")
    assert look(None)[0] == OK
    program(cuda / "bin/nvcc", "exit 1")
    assert look()[0] == CANNOT_SEE


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_build, "PATIENCE_S", 0.2)
    assert preflight_build.python(program(tmp_path / "python", "exec sleep 60"), None).verdict == ERROR
