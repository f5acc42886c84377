"""The example inventory's host, eight cards of SM120, serves with sparse attention by the series' own backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Stack
from octoserve import profile, unit_file

#: What an operator may change in a copy of the profile.
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "an fp8 cache": {"kv-cache-dtype": "fp8"},
    "back to dense attention": {"hf-overrides": {"index_topk": 0}, "attention-backend": "TRITON_MLA"},
}


@pytest.fixture(scope="module")
def found(patched: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By change, what the patched stack says to the arguments that the host's unit starts it with."""
    hosts = yaml.safe_load((ROOT / "inventory/example/hosts.yml").read_text())["octoserve"]["hosts"]
    (name,) = {host["octoserve_profile"] for host in hosts.values()}
    served = profile.check(yaml.safe_load((ROOT / f"files/profiles/{name}.yml").read_text()), name)["serve"]
    words = [unit_file.arguments(served["args"] | change) for change in CHANGES.values()]
    folder: Path = tmp_path_factory.mktemp("model")
    done = patched.run("check_profile_selection.py", str(folder), json.dumps(words))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CHANGES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_it_serves_with_sparse_attention_and_a_16_bit_cache(found: dict[str, Any]) -> None:
    assert found["as it is"] == {"chosen": "TRITON_MLA_SPARSE", "kv_cache_dtype": "auto"}


def test_an_fp8_cache_is_an_error_that_names_what_runs(found: dict[str, Any]) -> None:
    message = found["an fp8 cache"]["chosen"]
    assert "TRITON_MLA_SPARSE is not valid for this configuration" in message
    assert "What would run here: TRITON_MLA_SPARSE with --kv-cache-dtype auto or bfloat16; FLASHINFER_MLA" in message


def test_there_is_a_way_back_to_dense_attention(found: dict[str, Any]) -> None:
    assert found["back to dense attention"]["chosen"] == "TRITON_MLA"
