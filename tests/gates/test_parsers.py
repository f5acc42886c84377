"""Tools and reasoning through the parsers of real vLLM, asked by the default suite's own cases.

The model is tests/gates/parrot.py, which has learned the answers by heart in GLM's template.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from octoserve import coherence
from octoserve.coherence_suite import parse_suite
from octoserve.openai_api import Client

from tests.gates import serving

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "files/gates/default.yml"
SERVE = {
    "served-model-name": "parrot",
    "dtype": "float32",
    "enforce-eager": True,
    "max-model-len": 1024,
    "max-num-seqs": 8,
    "enable-auto-tool-choice": True,
}


@pytest.fixture(scope="module")
def parrot() -> Path:
    """The checkpoint, made anew where what it learns or how has changed."""
    sources = [Path(__file__).with_name("parrot.py"), SUITE]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    folder = serving.WORK / f"parrot-{digest}"
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}")
        with serving.patched() as site:
            serving.run("tests.gates.parrot", str(partial), site=site)
        partial.rename(folder)
    return folder


def ask(folder: Path, **parsers: str) -> dict[str, Any]:
    """Serve with these parsers and ask the cases that need any, as a profile that names both."""
    suite = yaml.safe_load(SUITE.read_text())
    suite["cases"] = [case for case in suite["cases"] if "needs" in case]
    settings = coherence.Settings({"enable_thinking": False}, {"tool_call": "glm47", "reasoning": "glm47"})
    with serving.patched() as site, serving.server(folder, {**SERVE, **parsers}, site) as url:
        return coherence.run(Client(url, timeout=120), [parse_suite(suite)], settings)


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {case["name"]: case["verdict"] for case in found["cases"]}


def test_the_right_parsers_pass(parrot: Path) -> None:
    found = ask(parrot, **{"tool-call-parser": "glm47", "reasoning-parser": "glm47"})
    assert found["ok"], coherence.describe(found)
    assert found["total"] == 6


def test_another_tool_parser_fails(parrot: Path) -> None:
    found = verdicts(ask(parrot, **{"tool-call-parser": "hermes", "reasoning-parser": "glm47"}))
    assert (found["tool-call"], found["tool-call (streamed)"]) == ("fail", "fail")


def test_no_reasoning_parser_fails(parrot: Path) -> None:
    found = verdicts(ask(parrot, **{"tool-call-parser": "glm47"}))
    assert (found["reasoning-apart"], found["reasoning-apart (streamed)"]) == ("fail", "fail")
