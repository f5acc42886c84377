"""The MTP block drafts what its reference drafts (tests/fixtures/tiny_glm/reference.py), and with a fault it does not.

Its answer would not tell: speculative decoding throws a wrong draft away, and a random model's drafts are never
taken. So the log probabilities of each draft are compared. Measured: 8e-5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import overlay
import pytest
from conftest import CASES, Stack, altered
from octoserve import patches

TOLERANCE = 1e-3
MTP = [name for name, case in CASES.items() if case["shape"].get("mtp_layers")]
EXCHANGED = overlay.Edit(
    file="vllm/model_executor/models/deepseek_mtp.py",
    old="torch.cat([inputs_embeds, previous_hidden_states], dim=-1)",
    new="torch.cat([previous_hidden_states, inputs_embeds], dim=-1)",
)


def drafts(stack: Stack, folders: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    done = stack.run("drafts.py", json.dumps(options), *map(str, folders), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("options", [{}, {"quantization": "gguf"}], ids=["dequantized", "quantized"])
def test_every_draft_is_the_reference_s(patched: Stack, models: dict[str, Path], options: dict[str, Any]) -> None:
    found = drafts(patched, [models[name] for name in MTP], options)
    assert {name: result.get("drafts") for name, result in found.items()} == dict.fromkeys(MTP, 18), found
    assert max(result["difference"] for result in found.values()) < TOLERANCE, found


def test_a_fault_in_the_mtp_block_is_seen(
    python: str, series: patches.Series, models: dict[str, Path], tmp_path: Path
) -> None:
    with altered(python, series, tmp_path / "site", set(), [EXCHANGED]) as stack:
        found = drafts(stack, [models[MTP[0]]], {})[MTP[0]]
    assert found.get("difference", 0) > 30 * TOLERANCE, found
