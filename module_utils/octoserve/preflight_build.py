"""Findings about what compiles kernels at the first start: Python, its headers, a compiler, nvcc."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .finding import CANNOT_SEE, ERROR, OK, WARNING, Finding

LEAST_PYTHON = (3, 11)  # vLLM's requires-python
# What systemd gives the service, whatever PATH the administrator has.
SERVICE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATIENCE_S = 20


def python(executable: str, wanted: str | None) -> Finding:
    """The Python that the release is made from; `wanted` is the minor version that the stack's lock is for."""
    name = "Python"
    text = f"Python {wanted}, which the stack is locked for" if wanted else "Python 3.11 or newer"
    found = _output([executable, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    version = re.fullmatch(r"(\d+)\.(\d+)", found or "")
    if not version:
        mend = "install it, or name another in octoserve_python"
        return Finding(name, ERROR, f"{executable} does not run", text, mend)
    measured = f"{executable} is {found}"
    if (int(version[1]), int(version[2])) < LEAST_PYTHON or wanted not in (None, found):
        mend = f"install Python {wanted or '3.12'} with its venv and dev packages, and name it in octoserve_python"
        return Finding(name, ERROR, measured, text, mend)
    return Finding(name, OK, measured, text)


def headers(executable: str) -> Finding:
    """Python.h, which Triton's launchers are compiled with."""
    name, wanted = "Python headers", "Python.h of the Python that serves"
    found = _output([executable, "-c", "import sysconfig; print(sysconfig.get_paths()['include'])"])
    if not found or not found.startswith("/"):
        return Finding(
            name, CANNOT_SEE, f"{executable} does not name its folder of headers", wanted, "mend Python first"
        )
    if (Path(found) / "Python.h").is_file():
        return Finding(name, OK, f"{found}/Python.h", wanted)
    mend = f"install the dev package of that Python, such as {Path(found).name}-dev"
    return Finding(name, ERROR, f"no {found}/Python.h", wanted, mend)


def compiler(path: str = SERVICE_PATH, include: Path = Path("/usr/include")) -> Finding:
    """gcc, g++ and the C library's headers."""
    name, wanted = "compiler", "gcc, g++ and the C library's headers: kernels are compiled at the first start"
    missing = [tool for tool in ("gcc", "g++") if shutil.which(tool, path=path) is None]
    if not (include / "stdio.h").is_file():
        missing.append(f"{include}/stdio.h")
    if missing:
        return Finding(name, ERROR, f"missing: {', '.join(missing)}", wanted, "`apt-get install build-essential`")
    found = _output([shutil.which("gcc", path=path) or "gcc", "-dumpfullversion"])
    return Finding(name, OK, f"gcc {found}" if found else "gcc of an unknown version", wanted)


def nvcc(cuda: str | None, path: str = SERVICE_PATH, toolkits: Sequence[Path] = (Path("/usr/local/cuda"),)) -> Finding:
    """CUDA's compiler and headers, which FlashInfer and DeepGEMM want; most models serve without."""
    name = "nvcc"
    wanted = f"nvcc of CUDA {cuda} or newer" if cuda else "nvcc"
    wanted += " with its headers, for kernels that are compiled for these cards at the first start"
    suffix = f"-{cuda.replace('.', '-')}" if cuda else ""
    package = f"NVIDIA's packages cuda-nvcc{suffix} and cuda-cudart-dev{suffix}"
    found = shutil.which("nvcc", path=":".join([path, *(str(folder / "bin") for folder in toolkits)]))
    if found is None:
        measured = f"not in the service's PATH nor below {', '.join(map(str, toolkits))}"
        without = "FlashInfer's backends fail without it, and its sampler unless VLLM_USE_FLASHINFER_SAMPLER is 0"
        return Finding(name, WARNING, measured, wanted, f"install {package}; {without}")
    version = re.search(r"release (\d+)\.(\d+)", _output([found, "--version"]) or "")
    if not version:
        return Finding(name, CANNOT_SEE, f"{found} does not say its version", wanted, f"`{found} --version`")
    measured = f"{found} of CUDA {version[1]}.{version[2]}"
    if cuda and (int(version[1]), int(version[2])) < tuple(map(int, cuda.split("."))):
        return Finding(name, WARNING, measured, wanted, f"install {package}")
    home = Path(found).resolve().parents[1]
    places = [home / "include", home / f"targets/{platform.machine()}-linux/include"]
    if not any((place / "cuda_runtime.h").is_file() for place in places):
        return Finding(name, WARNING, f"{measured}, without cuda_runtime.h", wanted, f"install {package}")
    return Finding(name, OK, measured, wanted)


def _output(command: Sequence[str]) -> str | None:
    """What the command writes, None where it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
