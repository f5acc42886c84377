"""A model's file that a proven deployment relies on is not replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from octoserve import deployment, model_pins
from octoserve.fetch import Wanted
from octoserve.receipt import Receipt

OLD, NEW = "a" * 64, "b" * 64


def record(state: Path, folder: Path, sha256: dict[str, str], reached: str = "passed", instance: str = "main") -> None:
    content: dict[str, Any] = {"model_files": {"folder": str(folder), "sha256": sha256}}
    made = state / "deployments" / instance
    deployment.set_state(made, deployment.record(made, content), reached)


def wanted(**digests: str | None) -> list[Wanted]:
    return [Wanted(name, f"https://hub/{name}", False, None, digest) for name, digest in digests.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models" / "glm"
    made.mkdir(parents=True)
    return made


def test_another_file_of_the_same_name_is_named(tmp_path: Path, folder: Path) -> None:
    record(tmp_path, folder, {"config": OLD, "tokenizer": OLD})
    (found,) = model_pins.conflicts(tmp_path, folder, wanted(config=NEW, tokenizer=OLD, other=NEW))
    assert found == (
        "deployment 1 of instance main was proven with config of sha256 aaaaaaaaaaaa…, wanted now is bbbbbbbbbbbb…"
    )


def test_what_nobody_goes_back_to_may_be_replaced(tmp_path: Path, folder: Path) -> None:
    record(tmp_path, folder, {"config": OLD}, reached="failed")
    record(tmp_path, folder / "elsewhere", {"config": OLD})
    assert model_pins.conflicts(tmp_path, folder, wanted(config=NEW)) == []


def test_a_file_without_a_pin_differs_from_nothing(tmp_path: Path, folder: Path) -> None:
    record(tmp_path, folder, {"config": OLD})
    assert model_pins.conflicts(tmp_path, folder, wanted(config=None)) == []


def test_the_splits_of_a_merged_file_count(tmp_path: Path, folder: Path) -> None:
    (folder / "glm.gguf").write_bytes(b"GGUF")
    Receipt(folder).record("glm.gguf", OLD, {"glm-00001": OLD, "glm-00002": OLD})
    record(tmp_path, folder, {"glm.gguf": OLD}, instance="other")
    (found,) = model_pins.conflicts(tmp_path, folder, wanted(**{"glm-00001": OLD, "glm-00002": NEW}))
    assert "instance other was proven with glm-00002" in found
    assert model_pins.conflicts(tmp_path, folder, wanted(**{"glm-00001": OLD, "glm-00002": OLD})) == []
