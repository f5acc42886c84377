"""What writes the indexer's keys and queries, on GPUs whose Triton has no e4m3: SM80 and SM86."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Stack, altered
from octoserve import patches

PATCH = "0025-round-to-e4m3-by-integers-where-the-gpu-has-no-such-type.patch"
LAYERS = ("vllm/model_executor/layers/sparse_attn_indexer.py", "vllm/models/glm5next/nvidia/sparse_indexer.py")


def ask(stack: Stack, *options: str, **environment: str) -> dict[str, Any]:
    done = stack.run("check_e4m3.py", str(stack.site), *options, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_rounding_is_the_cast_s_to_the_bit_and_what_is_written_is_right(patched: Stack) -> None:
    found = ask(patched, TRITON_INTERPRET="1")
    assert found == {"rounded_otherwise": 0, "keys": 0.0, "queries": 0.0, "queries_are": "torch.float8_e4m3fn"}


def test_the_kernels_compile(patched: Stack) -> None:
    found = ask(patched, "--compile")
    assert len(found) == 4
    assert [name for name, made in found.items() if "error" in made] == []


def test_without_the_patch_they_do_not(python: str, series: patches.Series, tmp_path: Path) -> None:
    with altered(python, series, tmp_path / "site", {PATCH}) as stack:
        found = ask(stack, "--compile")
    assert all("fp8e4nv not supported in this architecture" in made.get("error", "") for made in found.values())


@pytest.mark.parametrize("layer", LAYERS)
def test_queries_are_packed_as_bytes(patched: Stack, layer: str) -> None:
    """pack_seq_triton compiles for no e4m3 there. Read, as the second layer needs a CUDA build to run."""
    assert patched.site is not None
    tree = ast.parse((patched.site / layer).read_text(encoding="utf-8"))
    packed = [
        ast.unparse(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pack_seq_triton"
    ]
    queries = [what for what in packed if what.startswith("q_quant")]
    assert queries
    assert all(what.endswith(".view(torch.uint8)") for what in queries)
