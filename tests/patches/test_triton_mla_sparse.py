"""The sparse MLA kernel on the CPU: its answers in Triton's interpreter, and what it needs of each architecture.

The interpreter runs the kernel's own text with NumPy, program by program; the compiler needs no GPU. What only a GPU
shows (tensor cores, CUDA graphs, speed) is in tests/gpu/triton_mla_sparse.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from workers import SHARED_MEMORY, Ask, Case

KERNEL = "vllm/v1/attention/ops/triton_mla_sparse.py"
CHECK = "check_triton_mla_sparse.py"


def case_of(*batches: Case, config: list[int] | None = None, num_splits: int | None = 3, lse: bool = True) -> Case:
    """One batch or more of small shapes but for what is given."""
    shape = {"tokens": 3, "heads": 8, "topk": 70, "rows": 192, "dtype": "bfloat16"}
    run = {"config": config or [16, 16, 4, 2, 1], "num_splits": num_splits, "lse": lse}
    return {"batches": [{**shape, **batch} for batch in batches or ({},)], "run": run}


def is_right(answer: Case) -> bool:
    if "error" in answer:
        return False
    near = all(error <= answer["bound"] for error in answer["errors"])
    return near and not any(answer["lse_errors"]) and bool(answer["beside_untouched"])


@st.composite
def batches(draw: st.DrawFn) -> Case:
    """Shapes whose interpretation takes about a second at most."""
    heads = draw(st.sampled_from([8, 12, 16, 20, 32, 64, 128]))
    tokens = draw(st.integers(1, 4 if heads <= 16 else 2))
    topk = draw(st.integers(1, 100))
    counted = draw(st.booleans())
    page_size = draw(st.sampled_from([0, 16, 32, 64]))
    return {
        "tokens": tokens,
        "heads": heads,
        "topk": topk,
        "rows": 64 * draw(st.integers(1, 8)),
        "valid": draw(st.lists(st.sampled_from([0, 1, topk // 2, topk]), min_size=tokens, max_size=tokens)),
        "counted": counted,
        "scattered": not counted and draw(st.booleans()),
        "page_size": page_size,
        "page_gap": draw(st.integers(0, 3)) if page_size else 0,
        "row_gap": draw(st.sampled_from([0, 8, 64])),
        "rope": draw(st.sampled_from([64, 64, 0])),
        "split_q": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["bfloat16", "float16"])),
        "seed": draw(st.integers(0, 2**31)),
    }


@given(
    batch=batches(),
    config=st.sampled_from([[16, 16, 4, 2, 1], [16, 32, 4, 3, 1], [32, 64, 8, 3, 1], [64, 64, 8, 2, 1]]),
    num_splits=st.sampled_from([1, 1, 2, 3, 5, None]),
    lse=st.booleans(),
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
    interpreted: Ask, batch: Case, config: list[int], num_splits: int | None, lse: bool
) -> None:
    answer = interpreted(case_of(batch, config=config, num_splits=num_splits, lse=lse))
    assert is_right(answer), answer


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pages_of_any_size_lie_anywhere(interpreted: Ask, page_size: int, num_splits: int) -> None:
    shape = {"page_size": page_size, "page_gap": 5, "row_gap": 64, "valid": [70, 33, 0]}
    assert is_right(interpreted(case_of(shape, num_splits=num_splits)))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_token_without_slots_gives_zeros_and_nothing_of_the_batch_before(interpreted: Ask, num_splits: int) -> None:
    full, padded = {"tokens": 4, "seed": 1}, {"tokens": 4, "seed": 2, "valid": [70, 9, 0, 0]}
    empty = {"tokens": 2, "seed": 3, "valid": [0, 0], "counted": True}
    assert is_right(interpreted(case_of(full, padded, empty, full, num_splits=num_splits)))


def test_splits_and_none_agree(interpreted: Ask) -> None:
    errors = [interpreted(case_of({"dtype": "float16"}, num_splits=splits))["errors"][0] for splits in (1, 2, 5)]
    assert max(errors) < 2**-11


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scores += tl.dot(q_rope, tl.trans(k_rope))", "pass"),
        ("is_valid = (next_slots >= 0) & (positions < num_valid)", "is_valid = positions < num_valid"),
        ("is_valid = (next_slots >= 0) & (positions < num_valid)", "is_valid = next_slots >= 0"),
        ("acc2 = tl.dot(weights, kv2, acc2 * rescale)", "acc2 = tl.dot(weights, kv2, acc2)"),
        ("finite = tl.where(new_highest == float(\"-inf\"), 0.0, new_highest)", "finite = new_highest"),
        ("kv1 = tl.load(kv_ptrs + PART, mask=row_is_valid, other=0.0)", "kv1 = tl.load(kv_ptrs + PART)"),
        ("weights = tl.exp2(lse - finite)", "weights = tl.exp2(lse - lse)"),
        ("positions = split * BLOCK_N + tl.arange(0, BLOCK_N)", "positions = tl.arange(0, BLOCK_N)"),
        ("rows += (next_slots % PAGE_SIZE) * kv_stride_row", "rows += next_slots % PAGE_SIZE"),
        ("partial = out.unsqueeze(1)", "partial = torch.empty_like(out).unsqueeze(1)"),
        ("        num_valid = tl.max(", "        num_valid = tl.min("),
    ],
    ids=[
        "rope left out", "absent slots read", "counts not heeded", "a part not rescaled", "nothing valid so far",
        "unused rows multiplied", "splits not weighed", "every split the same slots", "rows of pages",
        "another tensor than the given one written", "last valid slot not found",
    ],
)  # fmt: skip
def test_a_fault_of_the_kernel_shows(interpreted: Ask, kernel: Path, tmp_path: Path, old: str, new: str) -> None:
    text = kernel.read_text(encoding="utf-8")
    assert old in text
    faulty = tmp_path / "triton_mla_sparse.py"
    faulty.write_text(text.replace(old, new), encoding="utf-8")
    shape = {"page_size": 32, "page_gap": 1, "row_gap": 8, "tokens": 2}
    cases = [
        case_of({**shape, "valid": [40, 9], "scattered": True}, {**shape, "valid": [0, 70]}, num_splits=splits)
        for splits in (1, 3)
    ]
    cases.append(case_of({**shape, "valid": [40, 9], "counted": True}))
    cases.append(case_of({**shape, "valid": [1, 2], "scattered": True, "seed": 1}, num_splits=1))
    assert all(is_right(interpreted(case)) for case in cases)
    assert not all(is_right(interpreted(case, faulty)) for case in cases)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_what_can_be_selected_fits_into_the_shared_memory(
    compiled: Callable[[int], list[Case]], capability: int
) -> None:
    found = compiled(capability)
    assert [one for one in found if one["shared"] > SHARED_MEMORY[capability]] == []
    assert {(one["config"][0], one["split"]) for one in found} >= {(16, False), (16, True), (32, False), (32, True)}
