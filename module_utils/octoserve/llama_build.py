"""Build llama-gguf-split from a llama.cpp source archive, and nothing that it does not need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import job
from .digest import sha256_file

TOOL = "llama-gguf-split"
#: Lies beside the finished tool and holds the SHA-256 of the source that it was built from.
STAMP = "source.sha256"
# The tool only moves bytes: little optimization, no OpenMP, no tuning for this very processor.
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_C_FLAGS_RELEASE=-O1",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DGGML_NATIVE=OFF",
    "-DGGML_OPENMP=OFF",
)
_STEP = re.compile(r"^\[(\d+)/(\d+)\]")


def built_from(path: Path) -> str:
    """SHA-256 of the source that the tool in a version's folder was built from, "" where there is no tool."""
    stamp = path / STAMP
    return stamp.read_text().strip() if stamp.exists() and (path / "bin" / TOOL).exists() else ""


def source_folder(tree: Path, archive: Path) -> Path:
    """llama.cpp's own folder in an unpacked archive, which an sdist keeps below vendor/. Raises WorkerError."""
    found = sorted(tree.glob("**/tools/gguf-split/CMakeLists.txt"), key=lambda path: len(path.parts))
    if not found:
        raise job.WorkerError(f"found no tools/gguf-split in {archive}, wanted the source of llama.cpp")
    return found[0].parents[2]


def work(spec: dict[str, Any], _secrets: dict[str, Any], progress: job.Progress) -> dict[str, Any]:
    """Build `spec["archive"]`, whose SHA-256 is `spec["sha256"]`, and put the tool into `spec["path"]`/bin."""
    path, archive = Path(spec["path"]), Path(spec["archive"])
    digest = sha256_file(archive)
    if digest != spec["sha256"]:
        raise job.WorkerError(f"{archive}: sha256 is {digest}, wanted {spec['sha256']}; bring it here again")
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        progress.phase("unpack the source")
        tree = partial / "source"
        tree.mkdir(parents=True)
        # tar's own defaults as root would give the tree to the archive's owner.
        _run(["tar", "--extract", "--no-same-owner", f"--file={archive}", f"--directory={tree}"])
        build = partial / "build"
        progress.phase("configure")
        _run(["cmake", "-G", "Ninja", "-S", str(source_folder(tree, archive)), "-B", str(build), *_OPTIONS])
        _compile(build, progress)
        progress.phase("put in place")
        made = partial / "made"
        (made / "bin").mkdir(parents=True)
        shutil.copy2(build / "bin" / TOOL, made / "bin" / TOOL)
        version = _run([str(made / "bin" / TOOL), "--version"]).strip()
        (made / STAMP).write_text(f"{digest}\n")
        shutil.rmtree(path, ignore_errors=True)
        made.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"version": version}


def _compile(build: Path, progress: job.Progress) -> None:
    """Run ninja and report its steps."""
    command = ["cmake", "--build", str(build), "--target", TOOL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last: list[str] = []
    total = 0
    assert process.stdout is not None
    for line in process.stdout:
        last = [*last[-20:], line]
        step = _STEP.match(line)
        if step and int(step[2]) != total:
            total = int(step[2])
            progress.phase("compile", total, "files")
        if step:
            progress.at(int(step[1]))
    if process.wait() != 0:
        raise job.WorkerError(f"the build ended with {process.returncode}: {''.join(last).strip()[-1500:]}")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise job.WorkerError(f"{command[0]} not found: apt-get install cmake ninja-build g++") from error
    if done.returncode != 0:
        raise job.WorkerError(f"{' '.join(command[:2])} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(job.main(work))
