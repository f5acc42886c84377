"""Which attention backend a sparse MLA model gets on which architecture, and why not another one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import ROOT, Stack

from tests import pages

PAGE = ROOT / "docs/patches.md"
NAME, PACKED = "TRITON_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"
CLASS = "vllm.v1.attention.backends.mla.triton_mla_sparse.TritonMLASparseBackend"
#: Cards, with FlashInfer's kernels, which need nvcc, unless they are said to be without.
PLACES: dict[str, dict[str, Any]] = {
    "SM80": {"capability": [8, 0], "flashinfer": True},
    "SM86": {"capability": [8, 6], "flashinfer": True},
    "SM89": {"capability": [8, 9], "flashinfer": True},
    "SM90": {"capability": [9, 0], "flashinfer": True},
    "SM100": {"capability": [10, 0], "flashinfer": True},
    "SM120": {"capability": [12, 0], "flashinfer": True},
    "SM120 without nvcc": {"capability": [12, 0]},
}
CACHES = ("auto", "bfloat16", "fp8", "fp8_ds_mla")
TABLE = {f"{place}, {cache}": {**PLACES[place], "kv_cache_dtype": cache} for place in PLACES for cache in CACHES}
#: Of these none is read.
UNREAD = [
    f"{place}, {cache}" for place in ("SM80", "SM86", "SM89", "SM120 without nvcc") for cache in ("fp8", "fp8_ds_mla")
]
SM120: dict[str, Any] = {"capability": [12, 0], "kv_cache_dtype": "auto"}
QUESTIONS: dict[str, dict[str, Any]] = {
    **TABLE,
    "queries of fp16": {**SM120, "dtype": "float16"},
    "queries of fp16, a cache of fp8": {**SM120, "dtype": "float16", "kv_cache_dtype": "fp8"},
    "a cache of fp16": {**SM120, "kv_cache_dtype": "float16"},
    "blocks of 16": {**SM120, "block_size": 16},
    "blocks of 8": {**SM120, "block_size": 8},
    "a short index": {**SM120, "config": {"index_topk": 100}},
    "another rank": {**SM120, "config": {"kv_lora_rank": 256}},
    "no rope": {**SM120, "head_size": 512},
    "SM75": {**SM120, "capability": [7, 5], "dtype": "float16"},
    "named": {**SM120, "flashinfer": True, "backend": NAME},
    "named, with a cache of fp8": {**SM120, "kv_cache_dtype": "fp8", "flashinfer": True, "backend": NAME},
    "named, not to be imported": {**SM120, "backend": "FLASHINFER_MLA"},
    "named, beside one that takes both": {**SM120, "capability": [9, 0], "kv_cache_dtype": "fp8", "backend": NAME},
    "named, with a type whose check fails": {
        **SM120, "kv_cache_dtype": "fp8", "flashinfer": True, "backend": NAME, "fails_for": "bfloat16",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def found(patched: Stack) -> dict[str, Any]:
    done = patched.run("check_mla_selection.py", json.dumps(list(QUESTIONS.values())))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(QUESTIONS, json.loads(done.stdout.splitlines()[-1]), strict=True))


def render(found: dict[str, Any]) -> str:
    """The table of docs/patches.md. Cards with the same rows have them in common."""
    cards: dict[str, list[str]] = {}
    for place in PLACES:
        caches: dict[str, list[str]] = {}
        for cache in CACHES:
            caches.setdefault(", ".join(found[f"{place}, {cache}"]["valid"]) or "none", []).append(cache)
        rows = [f"| {', '.join(of)} | {backends} |" for backends, of in caches.items()]
        cards.setdefault("\n| ".join(rows), []).append(place)
    lines = [f"| {', '.join(places)} {rows}" for rows, places in cards.items()]
    return "\n".join(["| card | KV cache | sparse backends, in the order of choice |", "|---|---|---|", *lines, ""])


def test_the_page_shows_what_runs_where(found: dict[str, Any]) -> None:
    shown = pages.between("selection").search(PAGE.read_text(encoding="utf-8"))
    assert shown
    assert shown[0] == render(found), f"put this between the markers of {PAGE}:\n{render(found)}"


@pytest.mark.parametrize("cache", ["auto", "bfloat16"])
@pytest.mark.parametrize("place", ["SM80", "SM86", "SM89", "SM120", "SM120 without nvcc"])
def test_it_is_chosen_where_no_kernel_is_made_for_the_card(found: dict[str, Any], place: str, cache: str) -> None:
    assert found[f"{place}, {cache}"]["chosen"] == CLASS


@pytest.mark.parametrize("name", ["queries of fp16", "blocks of 16", "no rope", "named"])
def test_it_is_chosen_for_what_it_can_read(found: dict[str, Any], name: str) -> None:
    assert found[name]["chosen"] == CLASS


@pytest.mark.parametrize("place", ["SM90", "SM100"])
def test_kernels_made_for_the_architecture_come_first(found: dict[str, Any], place: str) -> None:
    assert found[f"{place}, auto"]["priorities"][-1] == found[f"{place}, auto"]["valid"][-1] == NAME


def test_the_packed_cache_stays_with_flashinfer(found: dict[str, Any]) -> None:
    assert found["SM120, auto"]["valid"] == [NAME, PACKED]
    assert found["SM120, fp8_ds_mla"]["valid"] == [PACKED]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SM120, fp8_ds_mla", "reads a 16-bit KV cache, not fp8_ds_mla: set --kv-cache-dtype to auto or bfloat16"),
        ("queries of fp16, a cache of fp8", "not fp8: set --kv-cache-dtype to auto or float16"),
        ("blocks of 8", "block_size not supported"),
        ("a cache of fp16", "needs queries and KV cache of one type, not torch.bfloat16 and float16"),
        ("a short index", "requires index_topk to be a multiple of 128, got 100"),
        ("another rank", "requires kv_lora_rank=512, got 256"),
        ("SM75", "compute capability not supported"),
    ],
)
def test_it_says_why_it_cannot_run(found: dict[str, Any], name: str, reason: str) -> None:
    assert reason in ", ".join(found[name]["reasons"][NAME])


@pytest.mark.parametrize("name", [name for name in TABLE if name not in UNREAD])
def test_the_log_says_why_those_ahead_were_passed_over(found: dict[str, Any], name: str) -> None:
    one = found[name]
    ahead = one["priorities"][: one["priorities"].index(one["valid"][0])]
    reasons = "; ".join(f"{backend} ({', '.join(one['reasons'][backend])})" for backend in ahead)
    assert one["log"] == [
        f"Passed over, though ahead of {one['valid'][0]}: {reasons}.",
        f"Using {one['valid'][0]} attention backend out of potential backends: {one['valid']}.",
    ]


@pytest.mark.parametrize("name", [*UNREAD, "queries of fp16, a cache of fp8"])
def test_an_fp8_cache_that_nothing_reads_is_an_error_that_names_what_runs(found: dict[str, Any], name: str) -> None:
    cannot, _, runs = found[name]["chosen"].partition("}. What would run here: ")
    assert cannot.startswith("No valid attention backend found for cuda with AttentionSelectorConfig(")
    for backend in found[name]["priorities"]:
        assert f"{backend}: [{', '.join(found[name]['reasons'][backend])}]" in cannot + "]"
    own = "float16" if "fp16" in name else "bfloat16"
    assert runs == f"TRITON_MLA_SPARSE with --kv-cache-dtype auto or {own}."


def test_a_backend_that_is_asked_for_and_cannot_run_is_an_error_that_names_what_does(found: dict[str, Any]) -> None:
    both = "What would run here: TRITON_MLA_SPARSE with --kv-cache-dtype auto or bfloat16"
    fp8, missing = (found[f"named, {what}"]["chosen"] for what in ("with a cache of fp8", "not to be imported"))
    assert "TRITON_MLA_SPARSE is not valid for this configuration. Reason: [kv_cache_dtype not supported, TR" in fp8
    assert fp8.endswith(f"]. {both}; {PACKED} with --kv-cache-dtype fp8 or fp8_e4m3 or fp8_ds_mla.")
    assert missing.endswith(f"Reason: [ModuleNotFoundError: No module named 'flashinfer']. {both}.")


def test_no_16_bit_type_is_named_but_the_model_s(found: dict[str, Any]) -> None:
    runs = found["named, beside one that takes both"]["chosen"].partition("What would run here: ")[2]
    assert "FLASH_ATTN_MLA_SPARSE with --kv-cache-dtype auto or bfloat16;" in runs
    assert "float16" not in runs.replace("bfloat16", "")


def test_a_type_whose_check_fails_hides_neither_the_error_nor_the_other_types(found: dict[str, Any]) -> None:
    chosen = found["named, with a type whose check fails"]["chosen"]
    assert "TRITON_MLA_SPARSE is not valid for this configuration. Reason: [kv_cache_dtype not supported, TR" in chosen
    assert "TRITON_MLA_SPARSE with --kv-cache-dtype auto; " in chosen
