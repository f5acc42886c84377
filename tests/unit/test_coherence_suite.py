"""Suites of the coherence gate: what is read from them, and what is refused with which words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from octoserve.coherence_suite import (
    Agreement,
    Bound,
    Needle,
    Question,
    Score,
    completion_tokens,
    parse_suite,
    reasoning,
    tool_call,
)
from octoserve.openai_api import Completion, Usage

ROOT = Path(__file__).parents[2]
SUITES = sorted((ROOT / "files/gates").glob("*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def suite(**case: Any) -> dict[str, Any]:
    return {"name": "s", "cases": [{"name": "a", "prompt": "What?", "expect": {"accept": ["Paris"]}, **case}]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"name": "s", "cases": []}, "no cases"),
        ({"name": "s", "cases": None}, "no cases"),
        ({"cases": []}, "name: found None"),
        (suite(name=""), "without a name"),
        (suite(expect={}), "could not fail"),
        (suite(expect={"exact": 1}), "case 'a': unknown: exact"),
        (suite(expect={"accept": "Paris"}), "wanted a list"),
        (suite(expect={"accept": []}), "wanted a list"),
        (suite(expect={"accept": ["re:("]}), "no regular expression"),
        (suite(expect={"accept": ["..."]}), "no word"),
        (suite(expect={"count": {"from": 1}}), "to: found None"),
        (suite(expect={"count": {"from": 2, "to": 1}}), "nothing lies"),
        (suite(expect={"coherent": {"min_words": 0}}), "at least 1"),
        (suite(expect={"coherent": {"min_words": 5, "max": 1}}), "unknown: max"),
        (suite(expect={"coherent": {"min_words": 5, "language": "xx"}}), "'xx' is not known"),
        (suite(messages=[{"role": "user", "content": "x"}]), "either prompt or messages"),
        (suite(prompt=None, messages=[{"role": "user"}]), "wanted role and content"),
        (suite(max_token=5), "unknown: max_token"),
        ({"name": "s", "cases": [*suite()["cases"], *suite()["cases"]]}, "more than one case is called a"),
    ],
)
def test_a_wrong_suite_says_what_is_wrong(data: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_suite(data)


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_shipped_suites_are_valid(path: Path) -> None:
    data = load(path)
    assert data["name"] == path.stem
    prompts = {case.prompt for case in parse_suite(data).cases}
    assert {
        "What is the capital of France?",
        "Explain photosynthesis in a short paragraph.",
        "Count from 1 to 50, writing each number on a new line.",
    } <= prompts


def case(**data: Any) -> dict[str, Any]:
    return {"name": "s", "bound": {"mean": 0.1, "max": 1}, "cases": [{"name": "a", **data}]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (case(needle={"lengths": [], "depths": [0.5]}), "lengths: found []"),
        (case(needle={"lengths": [10], "depths": [0.5]}), "at least 200"),
        (case(needle={"lengths": ["all"], "depths": [0.5]}), "`served`"),
        (case(needle={"lengths": [2000], "depths": [1.5]}), "shares from 0 to 1"),
        (case(needle={"lengths": [2000], "depth": [0.5]}), "unknown: depth"),
        (case(score={"text": "Hello."}), "ceiling: found None, wanted a number above 0"),
        (case(score={"text": " ", "ceiling": 5}), "text: found ' '"),
        (case(score={"text": "x", "ceiling": 5, "bound": {"mean": 0.1}}), "max: found None"),
        (case(agreement={"prompt": "x", "tie": -1}), "tie: found -1"),
        (case(agreement={"max_tokens": 5}), "either prompt or messages"),
        (case(agreement={"prompt": "x"}, prompt="y"), "unknown: prompt"),
        (suite(needs=["vision"]), "needs: found ['vision']"),
        (suite(stream="yes"), "stream: found 'yes'"),
        (suite(max_tokens=0), "max_tokens: found 0"),
        (suite(expect={"tool_call": {"name": "f"}}), "arguments: found None"),
        (suite(expect={"tokens": {"min": 0}}), "min: found 0"),
        (suite(expect={"lines": {"number": 2, "each": "("}}), "no regular expression"),
        (suite(expect={"json": {"a": 1}}), "a list of accepted values"),
        ({**suite(), "concurrency": 4}, "unknown: concurrency"),
        ([1], "found a list, wanted a mapping with name"),
        ({"name": "mine", "cases": {"name": "x"}}, "cases: found a dict, wanted a list"),
    ],
)
def test_a_wrong_case_says_what_is_wrong(data: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_suite(data)


def test_cases_of_each_kind() -> None:
    needles = parse_suite(case(needle={"lengths": [2000, "served"], "depths": [0.1, 0.9]})).cases
    assert [entry.name for entry in needles][:3:2] == ["a at 10% of 2000 tokens", "a at 10% of all tokens"]
    assert [(entry.tokens, entry.depth) for entry in needles if isinstance(entry, Needle)][1::2] == [
        (2000, 0.9),
        (None, 0.9),
    ]
    (score,) = parse_suite(case(score={"text": "Hello.", "ceiling": 5, "prompt": "Greet."})).cases
    assert isinstance(score, Score)
    assert (score.prompt, score.bound) == ("user: Greet.\nassistant: Hello.", Bound(0.1, 1.0))
    (agreement,) = parse_suite(case(agreement={"prompt": "x", "bound": {"mean": 0.2, "max": 2}})).cases
    assert isinstance(agreement, Agreement)
    assert agreement.bound == Bound(0.2, 2.0)


def test_a_text_is_known_by_what_is_scored() -> None:
    def identity(**score: Any) -> str:
        (found,) = parse_suite(case(score={"ceiling": 5, **score})).cases
        assert isinstance(found, Score)
        return found.identity({})

    assert identity(text="Hello.") == identity(text=" Hello. ", ceiling=9)
    assert len({identity(text="Hello."), identity(text="Hello!"), identity(text="Hello.", prompt="Greet.")}) == 3


def test_both_ways_are_two_cases() -> None:
    whole, streamed = parse_suite(suite(stream="both")).cases
    assert (whole.name, streamed.name) == ("a", "a (streamed)")
    assert isinstance(whole, Question)
    assert isinstance(streamed, Question)
    assert (whole.stream, streamed.stream) == (False, True)


def test_a_suite_may_be_private_as_a_whole() -> None:
    document = {**suite(), "private": True}
    document["cases"].append({**document["cases"][0], "name": "b", "private": False})
    assert [entry.private for entry in parse_suite(document).cases] == [True, False]


def test_a_wrong_private_case_is_not_quoted() -> None:
    document = suite(private=True, prompt="Our secret?", expect={"accept": "A bottle opener"})
    with pytest.raises(ValueError, match="private, so no more is told") as refused:
        parse_suite(document)
    assert "bottle" not in str(refused.value)
    assert refused.value.__suppress_context__


def call(name: str = "get_weather", arguments: str = '{"city": "Paris, France"}', times: int = 1) -> Completion:
    called = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return Completion("", 0.1, tool_calls=(called,) * times, finish_reason="tool_calls")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (call(), None),
        (call(times=2), "found 2 tool calls"),
        (call(times=0), "found 0 tool calls"),
        (call("get_time"), "found a call of 'get_time'"),
        (replace(call(), finish_reason="stop"), "ended with 'stop'"),
        (replace(call(), tool_calls=({"function": {"name": "get_weather", "arguments": "{}"}},)), "has id None"),
        (call(arguments='{"city": "Par'), "no JSON"),
        (call(arguments="{}"), "wanted city"),
        (call(arguments='{"city": "Paris", "unit": "C"}'), "wanted city"),
        (call(arguments='{"city": "Lyon"}'), "city is 'Lyon'"),
    ],
)
def test_one_call_with_these_arguments(answer: Completion, reason: str | None) -> None:
    found = tool_call({"name": "get_weather", "arguments": {"city": ["Paris"]}})(answer)
    assert found == reason if reason is None else reason in str(found)


def test_reasoning_is_apart_or_not_there() -> None:
    thinks, answers = Completion("4", 0.1, reasoning="2 and 2 is 4"), Completion("4", 0.1)
    assert reasoning({"min_words": 3})(thinks) is None
    assert reasoning({"min_words": 3})(answers) == "found 0 words of reasoning, wanted at least 3"
    assert reasoning({"min_words": 0})(thinks) == "found 5 words of reasoning, wanted none"
    assert reasoning({"min_words": 0})(answers) is None


def test_an_answer_has_so_many_tokens() -> None:
    check = completion_tokens({"min": 100})
    assert check(Completion("x", 0.1, usage=Usage(7, 100))) is None
    assert check(Completion("x", 0.1, usage=Usage(7, 99))) == "found 99 tokens, wanted at least 100"
    assert check(Completion("x", 0.1)) == "found 0 tokens, wanted at least 100"


def test_the_page_shows_a_suite_that_can_be_asked() -> None:
    page = (ROOT / "docs/gates.md").read_text()
    shown = re.search(r"```yaml\n(name: ours\n.*?)```", page, re.DOTALL)
    assert shown
    names = {type(case).__name__ for case in parse_suite(yaml.safe_load(shown[1].replace("[...]", "[{}]"))).cases}
    assert names == {"Question", "Needle", "Agreement", "Score"}
