"""What was measured of the sparse MLA kernel on a card, judged by the bounds of today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "tests/gpu/triton_mla_sparse.json").read_text(encoding="utf-8"))
DECODE = {(row["requests"], row["heads"], row["context"]): row for row in RECORD["decode"]}


def test_every_answer_was_right() -> None:
    assert RECORD["failures"] == []
    assert max(RECORD["numbers"]["worst"], RECORD["graphs"]["worst"]) <= 2**-8


@pytest.mark.parametrize("context", [2048, 32768, 131072])
@pytest.mark.parametrize("heads", [8, 16])
def test_memory_bound_decode_comes_near_the_floor(heads: int, context: int) -> None:
    assert DECODE[128, heads, context]["share_of_floor"] >= 0.7
    # 32 requests are too short for the floor: reading the rows and nothing else takes 1.5 times as long.
    few = DECODE[32, heads, context]
    assert few["us"] <= 1.35 * few["gather_us"]
