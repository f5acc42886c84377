"""The coherence gate: healthy answers pass, sick ones fail, and a silent server is neither."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_openai_server import COUNT, Body, FakeOpenAiServer, Reply
from octoserve.answer_checks import (
    accept,
    coherent,
    count,
    find_loop,
    is_negated,
    states,
    tokens,
    well_formed,
    words,
)
from octoserve.coherence import describe, parse_suite, run_suite
from octoserve.openai_api import Client

ROOT = Path(__file__).parents[2]
SUITES = sorted((ROOT / "files/gates").glob("*.yml"))
CORPUS = ROOT / "tests/fixtures/tiny_glm/corpus.yml"

PHOTOSYNTHESIS = """
Photosynthesis is the process by which green plants, algae, and some bacteria convert light energy
into chemical energy. Using chlorophyll in their chloroplasts, they absorb sunlight and combine
carbon dioxide (CO₂) from the air with water (H₂O) from the soil to form glucose. Oxygen is released
as a by-product, and photons of wavelength λ near 680 nm drive the light reactions. It is the base
of most food chains on Earth.
"""
PROSE = coherent({"min_words": 20, "terms": [["sunlight"], ["oxygen", "O2"]]})


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "Paris",
        "The capital of France is **Paris**.",
        "It is PARIS!",
        "The capital is not Lyon, it is Paris.",
        "Not Lyon but Paris.",
        "The capital is Paris, not Lyon.",
        "There is no doubt that it is Paris.",
        "Paris is not only the capital but also the largest city.",
        "No, Paris is.",
        "It is Paris. Paris is not small.",
    ],
)
def test_a_form_is_said(text: str) -> None:
    assert accept(["Paris"])(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "Lyon",
        "Parisian",
        "The capital of France is not Paris.",
        "It isn't Paris.",
        "It isn\u2019t Paris.",
        "Paris is not the capital of France.",
        "Paris isn't the capital.",
        "I do not think it is Paris.",
        "The capital is Lyon, not Paris.",
        "It was never Paris.",
    ],
)
def test_a_form_is_missing_or_denied(text: str) -> None:
    assert accept(["Paris"])(text) is not None


def test_numbers_are_whole_numbers() -> None:
    assert states("It is 42.", "42")
    assert not states("It is 42.5", "42")
    assert not states("It is 1,420", "42")
    assert not states("It is 142", "42")


def test_a_negation_reaches_five_words() -> None:
    far = tokens("not a b c d e Paris")
    assert not is_negated(far, 6, 1)
    assert is_negated(far[1:1] + far[:1] + far[2:], 5, 1)


def test_exact_counting() -> None:
    check = count({"from": 1, "to": 50})
    assert check(COUNT) is None
    assert check(COUNT + "\n") is None
    assert check(COUNT.replace("\n", " \n")) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (COUNT.replace("\n17\n", "\n"), "line 17: found '18', wanted '17'"),
        (COUNT.replace("\n17\n", "\n17\n17\n"), "line 18: found '17', wanted '18'"),
        (COUNT + "\n51", "found 51 lines, wanted 50"),
        ("\n".join(COUNT.split("\n")[:49]), "found 49 lines, wanted 50"),
        (COUNT.replace("\n", " "), "line 1"),
        ("Sure:\n" + COUNT, "line 1"),
    ],
)
def test_a_wrong_count_names_the_first_difference(text: str, reason: str) -> None:
    found = count({"from": 1, "to": 50})(text)
    assert found is not None
    assert found.startswith(reason)


def test_healthy_prose_is_coherent() -> None:
    assert PROSE(PHOTOSYNTHESIS) is None


def soup(seed: int) -> str:
    """Words of the right subject in no language: what a model with one broken layer says."""
    vocabulary = [
        "sunlight",
        "oxygen",
        "widget",
        "reactor",
        "blue",
        "Tuesday",
        "carbon",
        "seven",
        "lamp",
        "tax",
    ]
    chosen = random.Random(seed)
    return " ".join(chosen.choice(vocabulary) for _ in range(60)) + " sunlight oxygen"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Sunlight makes oxygen.", "3 words"),
        (PHOTOSYNTHESIS.replace("sunlight", "rays"), "not on the subject"),
        (PHOTOSYNTHESIS + " the plant" * 12, "repeats itself: 'the plant'"),
        (PHOTOSYNTHESIS + " the" * 12, "repeats itself: 'the"),
        (" ".join([PHOTOSYNTHESIS] * 3), "repeats itself"),
        (PHOTOSYNTHESIS + " растения поглощают свет и воду", "other scripts: {'greek': 1, 'cyrillic': 26}"),
        (PHOTOSYNTHESIS + "植物利用阳光制造养分并释放氧气和水分", "other scripts: {'greek': 1, 'cjk': 18}"),
        (PHOTOSYNTHESIS + " " + "sunlight" * 6, "a word of 48 characters"),
        (soup(1), "no prose"),
        (soup(2), "no prose"),
    ],
)
def test_sick_prose_is_named(text: str, reason: str) -> None:
    found = PROSE(text)
    assert found is not None
    assert reason in found


def test_lists_and_refrains_are_no_loop() -> None:
    assert find_loop(words("very, very, very good, and very, very late")) is None
    steps = " ".join(f"In step {n} the plant moves thing number {n * 7} to place {n * 13}." for n in range(30))
    assert find_loop(words(steps)) is None


@pytest.mark.parametrize(
    "text", ["", " \n", "Par\ufffdis", "Paris<|user|>", "Paris</s>", "a\x00b", "a\ud800b", "<think>Paris"]
)
def test_no_answer_may_look_like_this(text: str) -> None:
    assert well_formed(text) is not None


def test_markdown_and_tabs_are_well_formed() -> None:
    assert well_formed("**Paris** <b>x</b>\n\t- a < b | c > d\r\n") is None


def suite(**case: Any) -> dict[str, Any]:
    return {"cases": [{"name": "a", "prompt": "What?", "expect": {"accept": ["Paris"]}, **case}]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"cases": []}, "no cases"),
        ({"cases": None}, "no cases"),
        (suite(name=""), "without a name"),
        (suite(expect={}), "could not fail"),
        (suite(expect={"exact": 1}), "case 'a': expect: unknown: exact"),
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
        ({"cases": [*suite()["cases"], *suite()["cases"]]}, "a more than once"),
    ],
)
def test_a_wrong_suite_says_what_is_wrong(data: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_suite(data)


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_shipped_suites_are_valid(path: Path) -> None:
    data = load(path)
    assert data["name"] == path.stem
    prompts = {case.prompt for case in parse_suite(data)}
    assert {
        "What is the capital of France?",
        "Explain photosynthesis in a short paragraph.",
        "Count from 1 to 50, writing each number on a new line.",
    } <= prompts


def corpus_script() -> Any:
    """Answer as the tiny model was trained to: the trained conversation with the same turns before."""
    answers = {}
    for conversation in load(CORPUS)["conversations"]:
        turns = conversation["turns"]
        for at in range(1, len(turns), 2):
            answers[tuple(turns[:at])] = turns[at]
    return lambda body: Reply(answers[tuple(message["content"] for message in body["messages"])])


def test_the_tiny_suite_asks_what_the_tiny_model_was_trained_on() -> None:
    cases = parse_suite(load(ROOT / "files/gates/tiny_glm.yml"))
    with FakeOpenAiServer(corpus_script()) as server:
        found = run_suite(Client(server.url), cases)
    assert found["ok"], describe(found)
    assert found["passed"] == found["total"] == len(cases)


def garbled(body: Body) -> Reply:
    text = corpus_script()(body).text
    letters = [chosen for chosen in text if not chosen.isspace()]
    random.Random(3).shuffle(letters)
    return Reply("".join(c if c.isspace() else letters.pop() for c in text))


@pytest.mark.parametrize(
    "script",
    [
        garbled,
        lambda _body: Reply(""),
        lambda _body: Reply("!" * 200),
        lambda _body: Reply("the " * 200, finish_reason="length"),
        lambda _body: Reply("\ufffd\ufffd"),
        lambda _body: Reply("The capital of France is not Paris."),
    ],
)
def test_gibberish_fails_every_case_without_an_exception(script: Any) -> None:
    cases = parse_suite(load(ROOT / "files/gates/tiny_glm.yml"))
    with FakeOpenAiServer(script) as server:
        found = run_suite(Client(server.url), cases)
    assert not found["ok"]
    assert {case["name"]: case["verdict"] for case in found["cases"]} == {case.name: "fail" for case in cases}
    assert all(case["reason"] for case in found["cases"])


def test_an_answer_that_does_not_end_fails() -> None:
    with FakeOpenAiServer(Reply("It is Paris", finish_reason="length")) as server:
        client = Client(server.url)
        cut = run_suite(client, parse_suite(suite(max_tokens=3)))
        allowed = run_suite(client, parse_suite(suite(max_tokens=3, allow_length=True)))
    assert cut["cases"][0]["reason"] == "the answer did not end within 3 tokens"
    assert allowed["ok"]


@pytest.mark.parametrize("reply", [Reply(status=500), Reply(status=429), Reply(raw_body=b"no json")])
def test_an_answer_that_cannot_be_had_is_no_pass(reply: Reply) -> None:
    data = {"cases": [{**suite()["cases"][0], "name": f"case-{n}"} for n in range(6)]}
    with FakeOpenAiServer(reply) as server:
        found = run_suite(Client(server.url), parse_suite(data), concurrency=1)
        assert len(server.requests) == 1  # a hung engine would cost a timeout a case
    assert (found["ok"], found["passed"], found["total"]) == (False, 0, 6)
    assert {case["verdict"] for case in found["cases"]} == {"could-not-run"}


def test_a_stream_that_dies_is_no_pass() -> None:
    with FakeOpenAiServer(Reply(COUNT, die_after=98)) as server:
        found = run_suite(Client(server.url), parse_suite(suite(stream=True)))
    assert found["cases"][0]["verdict"] == "could-not-run"


def test_a_result_tells_the_whole_story() -> None:
    with FakeOpenAiServer(Reply("It is Lyon.")) as server:
        found = run_suite(Client(server.url), parse_suite(suite()), {"chat_template_kwargs": {"x": 1}})
    case = found["cases"][0]
    assert (case["name"], case["prompt"], case["answer"]) == ("a", "What?", "It is Lyon.")
    assert case["usage"] == {"prompt_tokens": 7, "completion_tokens": 4}
    assert case["seconds"] > 0
    assert server.requests[0]["chat_template_kwargs"] == {"x": 1}
    message = describe(found)
    for part in ("0 of 1", "a: fail", "none of: 'Paris'", "What?", "It is Lyon."):
        assert part in message
