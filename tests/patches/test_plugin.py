"""Parts of the patched plugin by themselves: what it refuses, and what only a CUDA run uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Stack, altered
from octoserve import patches


def check(stack: Stack, folder: Path) -> dict[str, Any]:
    done = stack.run("check_plugin.py", str(folder))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def found(patched: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return check(patched, tmp_path_factory.mktemp("plugin"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "config: 2 tensors missing: blk.0.attn_v_b.weight, blk.1.ffn_up_exps.weight"),
        ("missing_split", "tensors missing: blk."),
        ("no_indexer", "5 tensors missing: blk.1.indexer.attn_k.weight, "),
        ("too_many_layers", "without a place: blk.2.attn_k_b.weight, "),
        ("too_many_experts", ", blk.1.ffn_gate_exps.weight (4, 32, 64) instead of (6, 32, 64)"),
        ("other_heads", "8 tensors of another shape: blk.0.attn_output.weight (64, 64) instead of (64, 128)"),
        ("expert_parallel", "model.layers.3.mlp.experts: the kernels for quantized experts know no expert parallelism"),
        ("extra_config", "takes no extra config but \"dequantize\", got ['dequantise']"),
        ("damaged", "/damaged/model.gguf is no GGUF file or shorter than its header says"),
        ("unfilled", "1 parameters without a tensor in the GGUF file: ['bias']"),
        ("one_half", "only one half of kv_b_proj in the file: ['a']"),
        ("typeless", "a.qweight comes without its quantization type"),
    ],
    ids=lambda value: value if value.isidentifier() else "",
)
def test_what_would_leave_a_weight_uninitialized_is_refused_by_name(
    found: dict[str, Any], name: str, message: str
) -> None:
    assert found[name].startswith("ValueError: ")
    assert message in found[name]


def test_indexers_and_mtp_are_left_aside_and_nothing_else(found: dict[str, Any]) -> None:
    aside = found["left_aside"]
    assert [name for name in aside if not name.startswith("blk.2.")] == [
        f"blk.{layer}.indexer.{part}"
        for layer in (0, 1)
        for part in ("attn_k.weight", "attn_q_b.weight", "k_norm.bias", "k_norm.weight", "proj.weight")
    ]
    assert {"blk.2.attn_norm.weight", "blk.2.nextn.eh_proj.weight"} <= set(aside)


def test_a_sparse_run_loads_the_indexers_that_the_file_has(found: dict[str, Any]) -> None:
    assert found["indexers"] == [
        f"model.layers.0.self_attn.indexer.{part}"
        for part in ("k_norm.bias", "k_norm.weight", "weights_proj.weight", "wk.weight", "wq_b.weight")
    ]


def test_a_draft_loads_the_mtp_block(found: dict[str, Any]) -> None:
    names = found["draft"]
    assert {name.split(".")[2] for name in names} == {"2"}
    mtp = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "self_attn.indexer.wk")
    assert {f"model.layers.2.{part}.weight" for part in mtp} - set(names) == {
        "model.layers.2.self_attn.indexer.wk.weight"  # attention is dense
    }


def test_a_gpu_has_these_modules_without_quantization(found: dict[str, Any]) -> None:
    assert found["unquantized"] == [
        "self_attn.indexer.k_norm",
        "self_attn.indexer.weights_proj",
        "self_attn.indexer.wk",
        "self_attn.indexer.wq_b",
        "self_attn.k_b_proj",
        "self_attn.kv_b_proj",
        "self_attn.o_proj",  # the user's choice
        "self_attn.v_b_proj",
    ]


def test_what_no_layer_computes_is_dequantized_or_refused_by_name(found: dict[str, Any]) -> None:
    layouts = found["layouts"]
    refused = {name: text.split(": ", 1)[1] for name, text in layouts.items() if isinstance(text, str)}
    gate_up = "experts.0.gate_proj's tensor (Q4_K) and experts.0.up_proj's tensor (Q5_K)"
    assert refused == {
        "no_kernel_at_all": "q_b_proj's tensor (Q8_K): it has to be dequantized, and gguf-py cannot",
        "partly_plain_experts": ("experts.0.down_proj's tensor (F16): no kernel for routed experts computes this type"),
        "cut_experts": "experts.0.down_proj's tensor (Q6_K): a rank's 256/2 columns end within a block",
        "half_a_stack": "experts.0.down_proj's tensor (Q6_K): routed experts are dequantized whole or not at all",
        "experts_over_more_ranks": "experts.0.down_proj's tensor (Q8_0): a rank's 64/4 columns end within a block",
        "two_types": f"{gate_up}: one kernel computes both and takes one type",
    }
    assert {name: modules for name, modules in layouts.items() if name not in refused} == {
        "fits": [],
        "wanted": ["0.indexer.wq_b"],
        "cut": ["0.down_proj", "0.o_proj"],
        "no_kernel": ["0.q_b_proj"],
        "partly_quantized": ["0.q_a_proj"],
        "plain_experts": [],
    }


def test_the_shards_of_a_fused_layer_are_read_in_place_and_in_order(found: dict[str, Any]) -> None:
    assert found["fused"] == {"shapes": [[2, 36], [3, 68]], "values": [0, 1], "in_place": True}


def test_tensors_are_parts_of_the_mapped_file(found: dict[str, Any]) -> None:
    assert found["mapped"] is True


def test_the_ranks_together_read_each_byte_once_in_order(found: dict[str, Any]) -> None:
    rank_0, rank_1 = found["shares"][:3], found["shares"][3:]
    assert rank_0 == [[10, 16], [26, 4], [60, 4]]
    assert rank_1 == [[30, 16], [46, 4], [64, 4]]


def test_progress_gives_bytes_rate_and_time_left(found: dict[str, Any]) -> None:
    assert found["progress"] == [
        "GGUF weights: 2.00 of 3.00 GB (67 %), 0.25 GB/s, 4 s left",
        "GGUF weights: 3.00 of 3.00 GB (100 %), 0.30 GB/s, 10 s",
    ]


def test_kernels_that_do_not_load_are_an_error(found: dict[str, Any]) -> None:
    assert found["no_kernels"].startswith(
        "ImportError: The CUDA kernels of vllm-gguf-plugin do not load: undefined symbol."
    )


def test_only_the_parameter_of_a_quantized_weight_is_renamed(found: dict[str, Any]) -> None:
    module = "model.layers.0.self_attn.indexer.weights_proj"
    assert found["renamed"] == [f"{module}.qweight_type", f"{module}.qweight"]


def test_each_rank_takes_its_own_shard(found: dict[str, Any]) -> None:
    assert found["shards"] == {"gate_up": [0, 4], "q": [0, 4], "k": [0, 2]}


def test_without_their_patches_the_parts_fail(python: str, series: patches.Series, tmp_path: Path) -> None:
    numbers = ("0011", "0012", "0013", "0014", "0019")
    left_out = {patch.file for patch in series.patches if patch.file.startswith(numbers)}
    assert len(left_out) == len(numbers)
    with altered(python, series, tmp_path / "site", left_out) as stack:
        released = check(stack, tmp_path / "files")
    module = "model.layers.0.self_attn.indexer.q"
    assert released["renamed"] == [f"{module}weight_types_proj.qweight_type", f"{module}weights_proj.qweight"]
    assert released["mapped"] is False
    assert released["shards"] == {"gate_up": [0, 0], "q": [0, 0], "k": [0, 0]}
    assert released["fused"]["in_place"] is False
    assert released["no_kernels"].startswith("AttributeError: ")


@pytest.mark.parametrize(
    ("ranks", "index_topk", "code", "wanted"),
    [
        (2, 0, 0, "DeepseekV3ForCausalLM at tensor-parallel size 2: 52 tensors of 4 files"),
        (4, 0, 1, "size 4: blk.1.ffn_down_exps.weight (Q6_K): a rank's 512/4 columns end within a block; blk.2."),
        (2, 2048, 1, "Sparse Attention is not supported on CPU"),
    ],
    ids=["fits", "does_not_fit", "no_backend"],
)
def test_a_file_is_checked_without_loading_it(
    patched: Stack, models: dict[str, Path], *, ranks: int, index_topk: int, code: int, wanted: str
) -> None:
    folder = models["glm5_unsloth_types_in_splits"]
    options = ["--hf-config-path", str(folder), "--tokenizer", str(folder), "--quantization", "gguf"]
    options += [f'--hf-overrides={{"index_topk": {index_topk}}}', "--tensor-parallel-size", str(ranks)]
    done = patched.execute("-m", "vllm_gguf_plugin.check", str(sorted(folder.glob("*.gguf"))[0]), *options)
    assert (done.returncode, wanted in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
    assert ("MLA with KV cache auto\n" in done.stdout) == (code == 0)
