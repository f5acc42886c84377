"""The stack that the numeric tests run on, patched as each test asks, and the models that it serves."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import overlay
import pytest
import yaml
from octoserve import patches, venv

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERIES = ROOT / "files/patches" / os.environ.get("OCTOSERVE_STACK", "vllm-0.32.0")
CACHE = ROOT / ".cache/patched" / SERIES.name
#: Random models by name: cases.yml.
CASES: dict[str, Any] = yaml.safe_load((HERE / "cases.yml").read_text(encoding="utf-8"))
#: Seconds that one interpreter may take; loading takes ten on an idle machine.
LIMIT = 600
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CACHE_ROOT": str(CACHE / "cache/vllm"),
    "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "cache/inductor"),
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else the engines of two tests share a core
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Stack:
    """An interpreter, and what lies over its distributions."""

    python: str
    site: Path | None = None

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script of this folder."""
        return self.execute(str(HERE / script), *arguments, **environment)

    def execute(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter."""
        path = {} if self.site is None else {"PYTHONPATH": str(self.site)}
        return subprocess.run(
            [self.python, *arguments],
            env={**os.environ, **ENVIRONMENT, **path, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    def score(
        self, folders: Sequence[Path], options: dict[str, Any] | None = None, **environment: str
    ) -> dict[str, Any]:
        """What score.py says about each model's folder."""
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process loads several models
        done = self.run("score.py", json.dumps(options or {}), *map(str, folders), **environment)
        if done.returncode:
            return {folder.name: {"error": f"exit {done.returncode}: {done.stderr[-2000:]}"} for folder in folders}
        result: dict[str, Any] = json.loads(done.stdout)
        return result


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Let one of the processes among which pytest shares the modules make what all of them use."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of an installed, unpatched CPU stack."""
    folder = os.environ.get("OCTOSERVE_STACK_VENV", "")
    path = Path(folder) / "bin/python"
    if not folder or not path.exists():
        lock = SERIES / "requirements-cpu.txt"
        pytest.fail(
            f"found OCTOSERVE_STACK_VENV={folder!r}, wanted a virtual environment with the CPU stack; "
            f"`make test-patches` makes one, by hand: python3.11 -m venv DIR && DIR/bin/pip install -r {lock}",
            pytrace=False,
        )
    return str(path)


@pytest.fixture(scope="session")
def series() -> patches.Series:
    return patches.load_series(SERIES)


@pytest.fixture(scope="session")
def patched(python: str, series: patches.Series) -> Stack:
    """The stack with the whole series. Kept between runs, under a name that says what is in it."""
    site_packages = patches.site_packages_of(python)
    known = [path.read_bytes() for path in sorted(SERIES.glob("*")) if path.suffix in (".patch", ".yml")]
    digest = hashlib.sha256(b"".join([*known, str(site_packages).encode()])).hexdigest()[:16]
    target = CACHE / digest
    with alone("patched"):
        for other in set(CACHE.glob("[0-9a-f]" * 16)) - {target}:
            shutil.rmtree(other)
        if not target.exists():
            overlay.build(target, site_packages, series)
    faults = patches.verify(patches.final_hashes(series), target)
    assert faults == [], f"{target} was edited; remove it"
    return Stack(python, target)


@pytest.fixture(scope="session")
def llama_cpp() -> Stack:
    """The interpreter that has llama.cpp, made from its lock where it is not there yet."""
    lock, path = ROOT / "requirements/llama_cpp.txt", ROOT / ".cache/llama_cpp"
    with alone("llama_cpp"):
        if not venv.is_installed(path, venv.digest(lock)):
            venv.make(path, sys.executable, venv.Source(lock), shutil.which("uv"))
    return Stack(str(path / "bin/python"))


@pytest.fixture(scope="session")
def models(python: str, llama_cpp: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of each random model of cases.yml, with what transformers and llama.cpp say to it."""
    own = tmp_path_factory.getbasetemp()
    # Beside those of the processes that pytest shares the modules among, where it does.
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "models"
    folders = {name: folder / name for name in CASES}
    with alone("models"):
        if not folder.exists():
            made = own / "half_made"
            done = Stack(python).run("make_models.py", str(made))
            assert done.returncode == 0, done.stderr
            done = llama_cpp.run("llama_cpp.py", *(str(made / name) for name in CASES))
            assert done.returncode == 0, done.stderr[-2000:]
            made.rename(folder)
    return folders


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest, patched: Stack) -> Path:
    """The file that the test module names KERNEL, as the series leaves it."""
    assert patched.site is not None
    path: Path = patched.site / request.module.KERNEL
    return path


@pytest.fixture(scope="module")
def interpreted(
    request: pytest.FixtureRequest, patched: Stack, kernel: Path
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Asks a kernel, that of the series if no other is named, by the module's script CHECK in one process."""
    from workers import Worker  # which builds on this file

    with Worker(patched, request.module.CHECK, TRITON_INTERPRET="1") as worker:
        yield lambda case, path=kernel: worker.ask({"kernel": str(path), **case})


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, patched: Stack, kernel: Path
) -> Iterator[Callable[[int], list[dict[str, Any]]]]:
    """Compiles what can be selected for a compute capability."""
    from workers import Worker

    with Worker(patched, request.module.CHECK, "--compile") as worker:
        yield lambda capability: worker.ask({"kernel": str(kernel), "compile": capability})


@contextlib.contextmanager
def altered(
    python: str, series: patches.Series, site: Path, left_out: set[str], edits: Sequence[overlay.Edit] = ()
) -> Iterator[Stack]:
    """The stack without some patches and with some texts changed, in a folder that is removed again."""
    kept = tuple(patch for patch in series.patches if patch.file not in left_out)
    overlay.build(site, patches.site_packages_of(python), patches.Series(kept), edits)
    try:
        yield Stack(python, site)
    finally:
        shutil.rmtree(site)
