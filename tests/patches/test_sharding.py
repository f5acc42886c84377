"""The shards of eight ranks, put together again, are the tensors of the file."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Stack, altered
from octoserve import patches

CASE = "glm5_for_eight_ranks"
#: Tensors of which a rank has a slice, by the name's end; each rank has all of the others.
ROWS = (
    "token_embd", "output", "attn_q_b", "attn_k_b", "attn_v_b", "ffn_gate", "ffn_up", "ffn_gate_exps", "ffn_up_exps",
    "ffn_gate_shexp", "ffn_up_shexp",
)  # fmt: skip
COLUMNS = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")


def shards(stack: Stack, model: Path) -> dict[str, str]:
    done = stack.run("check_sharding.py", str(model), "8", VLLM_CPU_OMP_THREADS_BIND="nobind")
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


def wanted(name: str) -> str:
    stem = name.removesuffix(".weight").rpartition(".")[2]
    return "rows" if stem in ROWS else "columns" if stem in COLUMNS else "every rank"


def test_eight_ranks_hold_the_file(patched: Stack, models: dict[str, Path]) -> None:
    found = shards(patched, models[CASE] / "model.gguf")
    assert len(found) == 34
    assert found == {name: wanted(name) for name in found}


def test_as_released_seven_ranks_hold_shards_of_the_first(
    python: str, series: patches.Series, models: dict[str, Path], tmp_path: Path
) -> None:
    left_out = {patch.file for patch in series.patches if patch.file.startswith("0013-")}
    with altered(python, series, tmp_path / "site", left_out) as stack:
        found = shards(stack, models[CASE] / "model.gguf")
    wrong = sorted(name for name in found if found[name] != wanted(name))
    assert wrong == [
        "blk.0.ffn_gate.weight",
        "blk.0.ffn_up.weight",
        "blk.1.ffn_gate_shexp.weight",
        "blk.1.ffn_up_shexp.weight",
    ], {name: found[name] for name in wrong}
