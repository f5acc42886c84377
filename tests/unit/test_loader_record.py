"""The committed proof of the loader on cards, judged again: every case and fault, by the bounds of today."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.gpu import loader_proof, real_slice  # noqa: E402 - found through the line above

RECORDS = {"loader.yml": "loader_proof.json", "sparse.yml": "sparse.json", "indexer.yml": "indexer.json"}
DOCUMENTS = {name: loader_proof.load_document(name) for name in RECORDS}
CASES = [(name, case) for name, document in DOCUMENTS.items() for case in loader_proof.load_cases(document)]


def record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "tests/gpu" / RECORDS[name]).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("part", ["models", "cases", "mutations"])
@pytest.mark.parametrize("name", RECORDS)
def test_the_record_is_of_what_is_asked_today(name: str, part: str) -> None:
    wanted = f"run make test-gpu (loader.yml: on two cards), and commit {RECORDS[name]}"
    assert record(name)[part] == DOCUMENTS[name][part], wanted


@pytest.mark.parametrize(("name", "case"), CASES, ids=[case.name for _, case in CASES])
def test_what_was_measured_on_cards_holds(name: str, case: loader_proof.Case) -> None:
    document = DOCUMENTS[name]
    asked = loader_proof.request(case, document["models"][case.fields["model"]], Path(), cpu=False)
    result = record(name)["results"][case.name]
    assert loader_proof.verdict(case, document, asked, result, cpu=False) == "ok" == result["verdict"]


def test_the_backends_agree_on_a_slice_of_real_dimensions() -> None:
    content = json.loads((ROOT / "tests/gpu/real_slice.json").read_text(encoding="utf-8"))
    assert content["dimensions"] == real_slice.DIMENSIONS, "run tests/gpu/real_slice.py on a card"
    rows = {(row["heads"], row["backend"], row["fault"]): row for row in content["rows"]}
    others = [backend for backend in real_slice.BACKENDS if backend != real_slice.STOCK]
    healthy = {(heads, backend, "") for heads in real_slice.HEADS for backend in others}
    faulty = {(heads, real_slice.BACKENDS[0], "rope_left_out") for heads in real_slice.HEADS}
    assert set(rows) == healthy | faulty
    assert all(rows[row]["within"]["decided"] > 3000 and rows[row]["beyond"]["decided"] > 10000 for row in rows)
    assert [real_slice.faults(rows[row]) for row in healthy] == [[]] * len(healthy)
    assert all(real_slice.faults(rows[row]) for row in faulty)
