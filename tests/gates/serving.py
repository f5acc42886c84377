"""Real vLLM on the CPU, patched, on a loopback port: started, waited for and stopped within bounds.

Needs module_utils and tests/patches on PYTHONPATH, as `make` sets it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import overlay
import yaml
from octoserve import patches, unit_file

ROOT = Path(__file__).resolve().parents[2]

STACK = os.environ.get("OCTOSERVE_STACK", "vllm-0.32.0")
SERIES = ROOT / "files/patches" / STACK
PYTHON = Path(os.environ.get("OCTOSERVE_STACK_VENV", ROOT / f".cache/stacks/{STACK}-cpu")) / "bin/python"
WORK = ROOT / ".cache/gates"
ADDRESS = "127.0.0.9"
#: Seconds. An idle machine of two cores needs 20 to start and 2 to stop.
START_LIMIT, STOP_LIMIT = 300.0, 30.0
#: The engine's processes are forked: started afresh, each of the two imports vLLM again, and a start takes three times
#: as long.
FORKED = overlay.Edit(
    "vllm/platforms/cpu.py",
    'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"',
    'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"',
)
#: Arguments of `vllm serve` and environment variables, by name.
Options = Mapping[str, Any]


class ServerError(RuntimeError):
    """The server did not come up; the message holds the end of its log."""


def series() -> patches.Series:
    """The patches of the stack under test."""
    return patches.load_series(SERIES)


def profile(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Server arguments and environment of a profile in files/profiles."""
    serve = yaml.safe_load((ROOT / f"files/profiles/{name}.yml").read_text(encoding="utf-8"))["serve"]
    arguments = {key: entry["value"] for key, entry in serve["args"].items()}
    environment = {key: str(entry["value"]) for key, entry in serve["env"].items()}
    return {"served-model-name": serve["served_model_name"], **arguments}, environment


@contextlib.contextmanager
def patched(left_out: Iterable[str] = (), edits: Sequence[overlay.Edit] = ()) -> Iterator[Path]:
    """The stack's packages with the series, less some patches and with some texts changed, in a folder for PYTHONPATH.

    Raises PatchError, and ValueError where an edit does not fit.
    """
    if not PYTHON.exists():
        raise ServerError(f"{PYTHON} not found; `make test-gates` makes the environment, or scripts/stack_venv.py")
    kept = tuple(patch for patch in series().patches if patch.file not in set(left_out))
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="site-", dir=WORK) as folder:
        site = Path(folder) / "site"
        overlay.build(site, installed_at(), patches.Series(kept), [FORKED, *edits])
        yield site


def installed_at() -> Path:
    """The folder of the stack's distributions, which need not be the interpreter's own."""
    code = "import importlib.util as u; print(u.find_spec('vllm_gguf_plugin').origin)"
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).parents[1]


def environment(site: Path, further: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the stack's interpreter runs with."""
    cache = WORK / "cache"
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # threads that wait for each other crawl where anything else runs
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        **(further or {}),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
    }


@contextlib.contextmanager
def server(
    model: Path, options: Options, site: Path, further: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[str]:
    """`vllm serve` of a model, ready; yields its base URL. Raises ServerError where it ends or takes too long."""
    port = free_port()
    command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += [*unit_file.arguments(options), "--host", ADDRESS, "--port", str(port)]
    log = log or log_file()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment(site, further),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://{ADDRESS}:{port}"
        wait_until_ready(url, process, log)
        yield url
    finally:
        stop(process)


def log_file() -> Path:
    """Where the output of this process's servers goes."""
    return WORK / f"server-{os.getpid()}.log"


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the health check. Raises ServerError."""
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with {process.returncode} before it was ready: {tail(log)}")
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.3)
    raise ServerError(f"the server was not ready after {START_LIMIT:.0f} s: {tail(log)}")


def alive(url: str) -> bool:
    """Whether the server says that its engine is well."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30):
            return True
    except OSError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes of its engine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT)
    with contextlib.suppress(ProcessLookupError):  # what did not end, and an engine that outlived its server
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, size: int = 2000) -> str:
    """The last bytes of a log, its errors before them."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [line for line in text.splitlines() if "Error" in line]
    return "\n".join(errors[:8])[:size] + "\n…\n" + text[-size:]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def run(script: str, *arguments: str, site: Path, limit: float = 600) -> str:
    """Run a module of the project in the stack's interpreter and return what it prints. Raises CalledProcessError."""
    done = subprocess.run(
        [str(PYTHON), "-m", script, *arguments],
        env={**environment(site), "PYTHONPATH": f"{site}:{ROOT}"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=limit,
        check=True,
    )
    return done.stdout
