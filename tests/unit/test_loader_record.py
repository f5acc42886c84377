"""The committed proof of the loader on cards, judged again: every case and fault, by the bounds of today."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.gpu import loader_proof  # noqa: E402 - found through the line above

RECORD: dict[str, Any] = json.loads((ROOT / "tests/gpu/loader_proof.json").read_text(encoding="utf-8"))
DOCUMENT = loader_proof.load_document()
CASES = {case.name: case for case in loader_proof.load_cases(DOCUMENT)}


@pytest.mark.parametrize("part", ["models", "cases", "mutations"])
def test_the_record_is_of_what_is_asked_today(part: str) -> None:
    assert RECORD[part] == DOCUMENT[part], "run make test-gpu on two cards, and commit its loader_proof.json"


@pytest.mark.parametrize("name", CASES)
def test_what_was_measured_on_cards_holds(name: str) -> None:
    case = CASES[name]
    asked = loader_proof.request(case, DOCUMENT["models"][case.fields["model"]], Path(), cpu=False)
    result = RECORD["results"][name]
    assert loader_proof.verdict(case, DOCUMENT, asked, result, cpu=False) == "ok" == result["verdict"]
