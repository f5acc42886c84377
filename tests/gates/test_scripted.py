"""The default suite against a scripted, fake model: it passes while healthy, and each fault of its server is caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from octoserve import coherence
from octoserve.coherence import Settings
from octoserve.coherence_suite import Suite, parse_suite
from octoserve.openai_api import Client

from tests.gates.scripted_faults import FAULTS, Fault, healthy, script_of
from tests.gates.scripted_model import Answer, Body, ScriptedModel, Seen, tokens_of

ROOT = Path(__file__).parents[2]
LIMITS = {"score-prose": 1.4, "score-code": 1.4, "score-answer": 1.4}  # the healthy script measures 1.28


def suite() -> Suite:
    return parse_suite(yaml.safe_load((ROOT / "files/gates/default.yml").read_text()))


def ask(fault: Fault, **settings: Any) -> dict[str, Any]:
    parsers = {"tool_call": "scripted", "reasoning": "scripted"}
    with ScriptedModel(**script_of(fault)).serve() as url:
        asked = Settings(parsers=parsers, perplexity=LIMITS, **settings)
        return coherence.run(Client(url, timeout=60), [suite()], asked)


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_server_passes_in_any_order(seed: int) -> None:
    found = ask(Fault(()), order_seed=seed, concurrency=1 + 3 * seed)
    assert found["ok"], coherence.describe(found)
    assert found["total"] == len(suite().cases)
    assert found["left_out"] == []


def thinking(body: Body, seen: Seen) -> Answer:
    """The healthy model, which thinks at length before each answer and is cut where it may not."""
    right, thoughts = healthy(body, seen), "Let me think about this before I say a word. " * 40
    allowed = body.get("max_tokens")
    if allowed is not None and allowed < len(tokens_of(thoughts)):
        return Answer(reasoning=thoughts[: 4 * allowed], finish_reason="length")
    return replace(right, reasoning=right.reasoning or thoughts)


def test_a_healthy_model_that_thinks_before_each_answer_passes() -> None:
    found = ask(Fault((), thinking))
    assert found["ok"], coherence.describe(found)


CHATTY = {
    "What is 2 + 2? You need no tool for this.": "2 + 2 = **4**\n\nNo tool was needed for this one.",
    "What is the chemical symbol of gold?": "**Au**\n\nNo other element uses it.",
    "What is the capital of France?": "_Paris_ — no doubt about it!",
    "What is my name?": "Your name is **Bruno** — no way I'd forget that!",
    "What is 17 times 23?": "**391**\n\nNo calculator needed.",
    "Which number was I to ask for? Answer with the number only.": "4,817",
    'Name three primary colours, one on each line, each line beginning with "- ". Write nothing else.': (
        "- **Red**\n- **Blue**\n- **Yellow**"
    ),
    "What is 12 times 12? Answer with the number only.": "144 (no rounding)",
}
WEATHER = "- **Conditions**: Hail\n\nNo other details were provided. Don't forget a coat!"


def chatty(body: Body, seen: Seen) -> Answer:
    """The healthy model in another mood: markup, closing sentences, dashes and brackets."""
    right, asked = healthy(body, seen), str(body["messages"][-1]["content"])
    if body["messages"][-1]["role"] == "tool":
        return replace(right, text=WEATHER)
    return replace(right, text=CHATTY.get(asked, right.text))


def test_a_healthy_model_that_chats_passes() -> None:
    found = ask(Fault((), chatty))
    assert found["ok"], coherence.describe(found)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_server_is_caught_by_its_cases(name: str) -> None:
    found = ask(FAULTS[name])
    verdicts = {case["name"]: case["verdict"] for case in found["cases"]}
    assert not found["ok"]
    assert "fail" in verdicts.values()
    assert {case: verdicts[case] for case in FAULTS[name].caught_by} == dict.fromkeys(FAULTS[name].caught_by, "fail")
    assert "could-not-run" not in verdicts.values(), coherence.describe(found)
