"""Which files of a profile are the model's GGUF."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError


def gguf_splits(*names: str, **more: Any) -> Any:
    path = Path(__file__).parents[2] / "filter_plugins" / "gguf_splits.py"
    spec = importlib.util.spec_from_file_location("gguf_splits", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sources = [{"url": "https://hub/o/r/resolve/main", "files": [{"path": f"Q4/{name}", **more} for name in names]}]
    return module.FilterModule().filters()["gguf_splits"](sources, "/models/m")


def test_splits_are_found_in_order_among_other_files() -> None:
    digest = "a" * 64
    found = gguf_splits("m-00002-of-00002.gguf", "config.json", "m-00001-of-00002.gguf", sha256=digest)
    assert found == {
        "prefix": "m",
        "names": ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"],
        "others": ["config.json"],
        "splits": [
            {"path": "/models/m/m-00001-of-00002.gguf", "sha256": digest},
            {"path": "/models/m/m-00002-of-00002.gguf", "sha256": digest},
        ],
    }


def test_whole_file_is_a_set_of_one() -> None:
    assert gguf_splits("m.gguf", "config.json")["splits"] == [{"path": "/models/m/m.gguf", "sha256": None}]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(["config.json"], "found 0 GGUF models", id="none"),
        pytest.param(["a.gguf", "b.gguf"], r"found 2 GGUF models in .*\['a', 'b'\]", id="two"),
        pytest.param(
            ["m-00001-of-00002.gguf"],
            r"found 1 splits .* wanted 2; missing: m-00002-of-00002\.gguf; not of them: none",
            id="missing",
        ),
        pytest.param(
            ["m-00001-of-00002.gguf", "m.gguf"], r"found 2 splits .* wanted 2; .* not of them: m\.gguf", id="mixed"
        ),
        pytest.param(
            ["m-00001-of-00002.gguf", "m-00002-of-00003.gguf"], "wanted 3; missing: m-00001-of-00003", id="counts"
        ),
        pytest.param(["a.gguf", "a.gguf"], "sources are not usable: a.gguf: wanted twice", id="twice"),
    ],
)
def test_unclear_sources_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(AnsibleFilterError, match=message):
        gguf_splits(*names)
