"""The fabric check on real cards: every value right, with and without peer-to-peer traffic."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu import fabric


def test_the_cards_reduce_right(tmp_path: Path) -> None:
    if reason := fabric.missing():
        pytest.skip(reason)
    code = fabric.main(tmp_path)
    result = json.loads((tmp_path / "fabric.json").read_text())
    print(json.dumps(result, indent=1))
    assert code == 0, result["runs"]
    assert {run["ranks"] for run in result["runs"].values()} == {len(result["cards"])}
