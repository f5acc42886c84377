"""The indexer's kernel on the CPU: its answers in Triton's interpreter, and what it needs of each architecture.

The interpreter runs the kernel's own text with NumPy; the compiler needs no GPU. What only a GPU shows (tensor cores,
CUDA graphs, speed) is in tests/gpu/triton_indexer.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import ROOT, Stack
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from workers import SHARED_MEMORY, Ask, Case

KERNEL = "vllm/v1/attention/ops/triton_indexer_logits.py"
CHECK = "check_triton_indexer.py"
BOUND = 2**-18  # of float32 sums, see indexer_kernel.py
#: columns, block_n, num_warps, num_stages, programs, has_e4m3
SMALL, LARGE, HALF = [64, 32, 4, 2, 4, True], [128, 64, 4, 3, 4, True], [64, 32, 4, 2, 4, False]


def case_of(*batches: Case, config: Sequence[object] | None = None, num_splits: int | None = 3) -> Case:
    return {"batches": list(batches), "run": {"config": config or SMALL, "num_splits": num_splits}}


def is_right(answer: Case) -> bool:
    if "error" in answer:
        return False
    return max(answer["errors"]) <= BOUND and answer["beside_untouched"] and not answer["wrong_choices"]


@st.composite
def decodes(draw: st.DrawFn) -> Case:
    """Requests of a decode step, padding among them."""
    page_size = draw(st.sampled_from([16, 32, 64]))
    edges = st.sampled_from([0, 1, page_size - 1, page_size, page_size + 1, 100])
    return {
        "contexts": draw(st.lists(st.one_of(edges, st.integers(0, 200)), min_size=1, max_size=4)),
        "next_n": draw(st.sampled_from([1, 1, 2, 3, 4, 5])),
        "heads": draw(st.sampled_from([16, 32, 64])),
        "page_size": page_size,
        "page_gap": draw(st.sampled_from([0, 16, 64 * 132])),
        "columns": draw(st.sampled_from([0, 256])),
        "per_row": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@st.composite
def prefills(draw: st.DrawFn) -> Case:
    """Requests of a chunk, whole prompts and the ends of some, or the rows that one rank takes of it."""
    seq_lens = draw(st.lists(st.integers(1, 120), min_size=1, max_size=3))
    query_lens = [draw(st.integers(1, min(length, 9))) for length in seq_lens]
    first = draw(st.integers(0, sum(query_lens) - 1))
    return {
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "heads": draw(st.sampled_from([16, 32, 64])),
        "rows": draw(st.sampled_from([None, (first, sum(query_lens))])),
        "seed": draw(st.integers(0, 2**31)),
    }


@given(
    batch=st.one_of(decodes(), prefills()),
    config=st.sampled_from([SMALL, LARGE, HALF, None]),
    num_splits=st.sampled_from([1, 2, 5, None]),
)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_any_batch_is_answered_as_in_float64(
    interpreted: Ask, batch: Case, config: Sequence[object] | None, num_splits: int | None
) -> None:
    answer = interpreted({"batches": [batch], "run": {"config": config, "num_splits": num_splits}})
    assert is_right(answer), answer


@pytest.mark.parametrize("config", [SMALL, HALF], ids=["e4m3", "half"])
def test_nothing_is_left_of_the_batch_before(interpreted: Ask, config: Sequence[object]) -> None:
    full, padded, empty = [90, 40, 33], [90, 0, 0], [0, 0, 0]
    batches = [{"contexts": contexts, "next_n": 2, "seed": seed} for seed, contexts in enumerate([full, padded, empty])]
    assert is_right(interpreted(case_of(*batches, batches[0], config=config)))


def test_ends_behind_the_last_key_are_taken_as_the_last_key(interpreted: Ask) -> None:
    assert is_right(interpreted(case_of({"query_lens": [3, 2], "seq_lens": [40, 33], "beyond": 50})))


FAULTS = {
    "pages in another order": ("table_ptr + keys // PAGE_SIZE", "table_ptr + (keys // PAGE_SIZE ^ 1)"),
    "pages ahead in another order": ("table_ptr + next_keys // PAGE_SIZE", "table_ptr + 0 * next_keys"),
    "keys beside their scales": ("+ keys % PAGE_SIZE * HEAD_DIM", "+ keys % PAGE_SIZE * (HEAD_DIM + 4)"),
    "the scale of another token": ("// 4) + keys % PAGE_SIZE", "// 4) + (keys + 1) % PAGE_SIZE"),
    "the scale of another gathered key": ("scale_offsets = keys\n", "scale_offsets = keys ^ 1\n"),
    "head weights shifted by one": (
        "pair_rows * weights_stride + pairs % NUM_HEADS", "pair_rows * weights_stride + (pairs + 1) % NUM_HEADS",
    ),
    "relu missing": ("tl.maximum(scores, 0.0)", "scores"),
    "a key before the first": ("keys[:, None] >= starts[None, :]", "keys[:, None] >= starts[None, :] - 1"),
    "the first key left out": ("keys[:, None] >= starts[None, :]", "keys[:, None] > starts[None, :]"),
    "a key behind the last": ("keys[:, None] < ends[None, :]", "keys[:, None] <= ends[None, :]"),
    "ends not held to the keys": ("ends = tl.minimum(ends, num_columns)", "pass"),
    "a key for padding": ("tl.minimum(ends, num_columns)", "tl.maximum(tl.minimum(ends, num_columns), 1)"),
    "every row the last one's context": (" - (rows_per_request - 1 - places)", ""),
    "every row the first one's context": ("tl.load(ends_ptr + rows", "tl.load(ends_ptr + request + 0 * rows"),
    "rows of the first request": ("(pair_rows * q_stride", "(pair_places * q_stride"),
    "logits of the first request": ("rows[None, :] * out_stride", "places[None, :] * out_stride"),
    "every split the next step": ("keys += num_splits * BLOCK_N", "keys += BLOCK_N"),
    "another tensor than the given one written": (
        "  out,\n        q.stride", "  out.new_empty(len(out) * out.stride(0)),\n        q.stride",
    ),
    "an exponent off by one": ("(bits & 0x7F) << 7", "(bits & 0x7F) << 8"),
    "halves not scaled back": ("scales *= 65536.0", "scales *= 256.0"),
}  # fmt: skip
FAULT_CASES = [
    case_of(
        {"contexts": [100, 0, 40], "next_n": 2, "page_size": 16, "page_gap": 16},
        {"contexts": [70, 1, 0], "next_n": 3, "page_size": 32, "per_row": False, "columns": 128},
        config=config,
    )
    for config in (SMALL, HALF)
] + [case_of({"query_lens": [3, 9], "seq_lens": [40, 75], "beyond": 9}, num_splits=2)]


@pytest.fixture(scope="module")
def sound(interpreted: Ask) -> None:
    """What the faulty kernels are asked is answered by the series' own."""
    assert all(is_right(interpreted(case)) for case in FAULT_CASES)


@pytest.mark.usefixtures("sound")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_kernel_shows(interpreted: Ask, kernel: Path, tmp_path: Path, fault: str) -> None:
    old, new = FAULTS[fault]
    text = kernel.read_text(encoding="utf-8")
    assert old in text
    faulty = tmp_path / "triton_indexer_logits.py"
    faulty.write_text(text.replace(old, new), encoding="utf-8")
    answers = [interpreted(case, faulty) for case in FAULT_CASES]
    assert [answer["error"] for answer in answers if "error" in answer] == []
    assert not all(map(is_right, answers))


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_what_can_be_selected_fits_and_multiplies_as_the_architecture_can(
    compiled: Callable[[int], list[Case]], capability: int
) -> None:
    found = compiled(capability)
    assert [one for one in found if one["shared"] > SHARED_MEMORY[capability] or one["stack"]] == []
    assert {(one["heads"], one["block_m"]) for one in found} >= {(32, 1), (32, 2), (64, 1)}
    kind = "f16" if capability < 89 else {90: "wgmma", 100: "tcgen05"}.get(capability, "e4m3")
    assert all(kind in one["products"][0] for one in found)


def test_the_script_for_a_card_runs_through_on_a_cpu(patched: Stack, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    script = ROOT / "tests/gpu/triton_indexer.py"
    done = patched.execute(str(script), str(record), "--cpu", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = json.loads(record.read_text(encoding="utf-8"))
    assert written["failures"] == []
    assert {"numbers", "graphs", "decode", "prefill", "configs"} <= written.keys()
