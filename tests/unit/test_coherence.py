"""The coherence gate: a silent server, private cases, first deploys, and what a result tells."""

from __future__ import annotations

import json
import math
import random
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_openai_server import COUNT, Body, FakeOpenAiServer, Reply
from octoserve import coherence, reference
from octoserve.coherence import PRIVATE, REFERENCE_ROOM, Settings, describe, run
from octoserve.coherence_suite import Score, check_held, parse_suite
from octoserve.openai_api import Client

from tests.gates.scripted_model import Answer, ScriptedModel

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests/fixtures/tiny_glm/corpus.yml"


def suite(**case: Any) -> dict[str, Any]:
    return {"name": "s", "cases": [{"name": "a", "prompt": "What?", "expect": {"accept": ["Paris"]}, **case}]}


def ask(url: str, document: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return run(Client(url), [parse_suite(document)], Settings(**settings))


def questions_of_the_tiny_suite() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "files/gates/tiny_glm.yml").read_text())
    return {**document, "cases": [case for case in document["cases"] if "expect" in case]}


def corpus_script() -> Any:
    """Answer as the tiny model was trained to: the trained conversation with the same turns before."""
    answers = {}
    for conversation in yaml.safe_load(CORPUS.read_text())["conversations"]:
        turns = conversation["turns"]
        for at in range(1, len(turns), 2):
            answers[tuple(turns[:at])] = turns[at]
    return lambda body: Reply(answers[tuple(message["content"] for message in body["messages"])])


def test_the_tiny_suite_asks_what_the_tiny_model_was_trained_on() -> None:
    document = questions_of_the_tiny_suite()
    with FakeOpenAiServer(corpus_script()) as server:
        found = ask(server.url, document)
    assert found["ok"], describe(found)
    assert found["passed"] == found["total"] == len(document["cases"])


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
    document = questions_of_the_tiny_suite()
    with FakeOpenAiServer(script) as server:
        found = ask(server.url, document)
    assert not found["ok"]
    assert [case["verdict"] for case in found["cases"]] == ["fail"] * len(document["cases"])
    assert all(case["reason"] for case in found["cases"])


def test_an_answer_that_does_not_end_fails() -> None:
    with FakeOpenAiServer(Reply("It is Paris", finish_reason="length")) as server:
        cut = ask(server.url, suite(max_tokens=3))
        allowed = ask(server.url, suite(max_tokens=3, allow_length=True))
    assert cut["cases"][0]["reason"] == "the answer did not end within 3 tokens"
    assert allowed["ok"]


@pytest.mark.parametrize("reply", [Reply(status=500), Reply(status=429), Reply(raw_body=b"no json")])
def test_an_answer_that_cannot_be_had_is_no_pass(reply: Reply) -> None:
    document = {"name": "s", "cases": [{**suite()["cases"][0], "name": f"case-{n}"} for n in range(6)]}
    with FakeOpenAiServer(reply) as server:
        found = ask(server.url, document)
    assert (found["ok"], found["passed"], found["total"]) == (False, 0, 6)
    assert {case["verdict"] for case in found["cases"]} == {"could-not-run"}


def test_a_server_that_is_full_for_a_moment_is_asked_again() -> None:
    replies = iter([Reply(status=429, headers={"Retry-After": "0"}), Reply("It is Paris.")])
    with FakeOpenAiServer(lambda _body: next(replies)) as server:
        assert ask(server.url, suite())["ok"]


@pytest.mark.parametrize("content", [["Paris"], {"text": "Paris"}, 5])
def test_an_answer_of_another_shape_fails_its_case_and_no_other(content: Any) -> None:
    first = suite()["cases"][0]
    document = {"name": "s", "cases": [{**first, "name": "good"}, {**first, "name": "bad", "prompt": "Which shape?"}]}

    def reply(body: Body) -> Reply:
        asked = body["messages"][0]["content"]
        return Reply("It is Paris.", message={"content": content} if asked == "Which shape?" else {})

    with FakeOpenAiServer(reply) as server:
        found = ask(server.url, document)
    verdicts = {case["name"]: case["verdict"] for case in found["cases"]}
    assert verdicts == {"good": "pass", "bad": "fail"}
    assert "cannot be read" in found["cases"][1]["reason"]


def test_a_tool_that_nobody_wanted_fails() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    with FakeOpenAiServer(Reply("It is Paris.", message={"tool_calls": [call]})) as server:
        found = ask(server.url, suite())
    assert found["cases"][0]["reason"] == "the answer calls 1 tools, wanted none"


def test_a_right_answer_again_and_again_fails() -> None:
    with FakeOpenAiServer(Reply("The capital of France is Paris. " * 40)) as server:
        found = ask(server.url, suite())
    assert "the answer repeats itself" in found["cases"][0]["reason"]


def test_broken_reasoning_fails_beside_a_right_answer() -> None:
    with FakeOpenAiServer(Reply("It is Paris.", message={"reasoning": "so \ufffd\ufffd"})) as server:
        found = ask(server.url, suite())
    assert "reasoning: broken UTF-8" in found["cases"][0]["reason"]


def test_a_server_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence, "PROBE_TIMEOUT_S", 0.2)
    document = {"name": "s", "cases": [{**suite()["cases"][0], "name": f"case-{n}"} for n in range(6)]}
    with FakeOpenAiServer(Reply("Paris", ttft_s=3.0)) as server:
        client = Client(server.url, "fake", timeout=0.2)
        found = run(client, [parse_suite(document)], Settings(concurrency=1))
        assert (
            len(server.requests) == 2
        )  # a hung engine would cost a timeout a case; the second is the shortest question
    assert {case["verdict"] for case in found["cases"]} == {"could-not-run"}
    assert found["cases"][-1]["reason"] == "not asked: a case before it brought no answer"


def test_one_slow_answer_does_not_silence_the_rest() -> None:
    document = {
        "name": "s",
        "cases": [{**suite()["cases"][0], "name": name, "prompt": name} for name in ("slow", "b", "c")],
    }

    def script(body: Body) -> Reply:
        return Reply("Paris", ttft_s=1.0 if body["messages"][0]["content"] == "slow" else 0.0)

    with FakeOpenAiServer(script) as server:
        found = run(Client(server.url, "fake", timeout=0.3), [parse_suite(document)], Settings(concurrency=1))
    assert [case["verdict"] for case in found["cases"]] == ["could-not-run", "pass", "pass"]


@pytest.mark.parametrize("reason", ["abort", "content_filter"])
def test_an_answer_that_was_ended_by_something_else_fails(reason: str) -> None:
    with FakeOpenAiServer(Reply("Paris", finish_reason=reason)) as server:
        found = ask(server.url, suite())
    assert found["cases"][0]["reason"] == f"the answer ended with {reason!r}, wanted stop"


def test_a_model_that_thinks_gets_the_tokens_for_it() -> None:
    parsers = {"reasoning": "glm47"}
    with FakeOpenAiServer(Reply("Paris", reasoning="France, so:")) as server:
        ask(server.url, suite(max_tokens=9), parsers=parsers)
        ask(server.url, suite(max_tokens=9), parsers=parsers, chat_template_args={"enable_thinking": False})
        ask(server.url, suite(max_tokens=9, chat_template_args={"enable_thinking": True}), parsers=parsers)
    asked = [request["max_tokens"] for request in server.requests]
    assert asked == [9 + coherence.THINKING_TOKENS, 9, 9 + coherence.THINKING_TOKENS]


def test_a_stream_that_dies_is_no_pass() -> None:
    with FakeOpenAiServer(Reply(COUNT, die_after=98)) as server:
        found = ask(server.url, suite(stream=True))
    assert found["cases"][0]["verdict"] == "could-not-run"


def test_a_result_tells_the_whole_story() -> None:
    document = suite(chat_template_args={"think": True}, max_tokens=9)
    with FakeOpenAiServer(Reply("It is Lyon.")) as server:
        found = ask(server.url, document, chat_template_args={"x": 1, "think": False})
    (case,) = found["cases"]
    assert (case["name"], case["prompt"], case["answer"]) == ("a", "What?", "It is Lyon.")
    assert case["usage"] == {"prompt_tokens": 7, "completion_tokens": 4}
    assert case["seconds"] > 0
    (request,) = server.requests
    assert request["chat_template_kwargs"] == {"x": 1, "think": True}
    assert (request["temperature"], request["max_tokens"]) == (0.0, 9)
    message = describe(found)
    for part in ("0 of 1", "a: fail", "none of: 'Paris'", "What?", "It is Lyon."):
        assert part in message


def test_progress_is_told_after_each_case() -> None:
    document = {"name": "s", "cases": [{**suite()["cases"][0], "name": name} for name in "abc"]}
    told: list[tuple[str, int, int]] = []
    with FakeOpenAiServer(Reply("Lyon")) as server:
        run(Client(server.url), [parse_suite(document)], Settings(concurrency=1), lambda *step: told.append(step))
    assert told == [(f"coherence, {n} did not pass, last {name}", n, 3) for n, name in enumerate("abc", 1)]


def test_cases_without_their_parser_are_left_out_and_named() -> None:
    document = suite()
    document["cases"].append({**document["cases"][0], "name": "b", "needs": ["tool_call"]})
    with FakeOpenAiServer(Reply("Paris")) as server:
        without = ask(server.url, document)
        with_it = ask(server.url, document, parsers={"tool_call": "glm47"})
    assert (without["ok"], without["total"]) == (True, 1)
    assert without["left_out"] == [{"name": "b", "reason": "the profile names no tool_call parser"}]
    assert (with_it["total"], with_it["left_out"]) == (2, [])


def test_a_needle_longer_than_what_is_served_is_left_out() -> None:
    document = {"name": "s", "cases": [{"name": "n", "needle": {"lengths": [500, 3000, "served"], "depths": [0.5]}}]}
    with ScriptedModel(lambda _body, _seen: Answer("12345"), max_model_len=2000).serve() as url:
        found = ask(url, document)
    assert [case["name"] for case in found["cases"]] == ["n at 50% of 500 tokens", "n at 50% of all tokens"]
    assert found["left_out"][0]["name"] == "n at 50% of 3000 tokens"
    assert "2000 tokens" in found["left_out"][0]["reason"]
    whole = found["cases"][1]
    assert whole["verdict"] == "fail"  # the script knows no code
    assert 1600 < whole["measured"]["prompt_tokens"] <= 2000 - 256


def test_after_its_time_no_case_is_asked() -> None:
    document = {"name": "s", "cases": [{**suite()["cases"][0], "name": name} for name in "ab"]}
    with FakeOpenAiServer(Reply("Paris")) as server:
        found = ask(server.url, document, limit_s=-1.0)
        in_time = ask(server.url, document, limit_s=60.0)
    assert [case["verdict"] for case in found["cases"]] == ["could-not-run"] * 2
    assert found["cases"][0]["reason"] == "not asked: the -1 s of this gate were over"
    assert in_time["ok"]


def test_a_sampled_case_names_no_temperature() -> None:
    with FakeOpenAiServer(Reply("Paris")) as server:
        ask(server.url, suite(sampled=True))
        ask(server.url, suite())
    assert [request["temperature"] for request in server.requests] == [None, 0.0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("{code}", finish_reason="length"), "the answer did not end within 64 tokens"),
        (Answer("{code}", finish_reason="abort"), "the answer ended with 'abort', wanted stop"),
        (Answer("{code}" + " and so on" * 20), "the answer repeats itself"),
        (Answer("{code}, как было сказано в тексте"), "drift into other scripts"),
        (Answer("{code} \ufffd"), "broken UTF-8"),
        (Answer("{code}"), ""),
    ],
)
def test_a_needle_that_is_found_is_not_all(answer: Answer, reason: str) -> None:
    def script(body: Body, _seen: Any) -> Answer:
        code = re.search(r"archive is (\d+)\.", body["messages"][0]["content"])
        assert code is not None
        return replace(answer, text=answer.text.format(code=code[1]))

    needle = {"lengths": [600], "depths": [0.5], "max_tokens": 64}
    with ScriptedModel(script).serve() as url:
        (case,) = ask(url, {"name": "s", "cases": [{"name": "n", "needle": needle}]})["cases"]
    assert (case["verdict"] == "pass") == (not reason)
    assert reason in case["reason"]


@pytest.mark.parametrize("reply", [Reply("<think>It is Paris"), Reply("So. </think> Paris", finish_reason="length")])
def test_a_model_that_thinks_aloud_is_no_riddle(reply: Reply) -> None:
    with FakeOpenAiServer(reply) as server:
        aloud, apart = (ask(server.url, suite(), parsers=parsers) for parsers in ({}, {"reasoning": "glm45"}))
    advice = "name parsers.reasoning in the profile, or turn thinking off in its chat_template_args"
    assert aloud["cases"][0]["reason"].endswith(advice)
    assert apart["cases"][0]["verdict"] == "fail"
    assert advice not in apart["cases"][0]["reason"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_named(status: int) -> None:
    with FakeOpenAiServer(Reply(status=status)) as server:
        found = ask(server.url, suite())
    assert "check octoserve_api_key" in found["cases"][0]["reason"]


SECRET = "What is the name of our next product?"


@pytest.mark.parametrize("answer", ["It is Lyon", "It is Paris"])
def test_of_a_private_case_nothing_is_told(answer: str) -> None:
    document = suite(private=True, prompt=SECRET)
    with FakeOpenAiServer(Reply(answer, reasoning="Hush.")) as server:
        found = ask(server.url, document)
    (case,) = found["cases"]
    assert case["verdict"] == ("pass" if "Paris" in answer else "fail")
    assert (case["prompt"], case["answer"], case["reasoning"]) == (PRIVATE, PRIVATE, PRIVATE)
    assert case["reason"] == ("" if "Paris" in answer else f"accept {PRIVATE}")
    told = json.dumps(found) + describe(found)
    for part in (SECRET, answer, "Hush", "Paris"):
        assert part not in told


SCORED = {
    "name": "s",
    "cases": [
        {"name": "prose", "score": {"text": "The ship came home before the storm and all were glad.", "ceiling": 5}}
    ],
}


def measured(shift: float = 0.0, **settings: Any) -> dict[str, Any]:
    model = ScriptedModel(lambda _body, _seen: Answer("A story."), score_shift=lambda _tokens, _seen: shift)
    with model.serve() as url:
        return ask(url, SCORED, **settings)


def test_a_text_is_scored_under_a_load_that_is_there() -> None:
    model = ScriptedModel(lambda _body, _seen: Answer("A story of the sea. " * 40))
    with model.serve() as url:
        (case,) = ask(url, SCORED, perplexity={"prose": 1.5}, concurrency=3)["cases"]
    assert case["verdict"] == "pass", case["reason"]
    assert case["measured"]["under_load"] == {"mean": 0.0, "max": 0.0, "streams": 3}


def test_without_load_there_is_no_pass() -> None:
    class Refusing(ScriptedModel):
        """Refuses to stream."""

        def events(self, body: Body) -> Any:
            yield {"error": {"message": "too many requests"}}

    with Refusing(lambda _body, _seen: Answer("A story.")).serve() as url:
        (case,) = ask(url, SCORED, perplexity={"prose": 1.5})["cases"]
    assert case["verdict"] == "could-not-run"
    assert "no other answer was under way" in case["reason"]
    assert "too many requests" in case["reason"]


class ScoresTwice(ScriptedModel):
    """Scores a prompt twice and then no more."""

    scored = 0

    def score(self, body: Body) -> Body:
        self.scored += 1
        return super().score(body) if self.scored <= 2 else {"choices": []}


def test_a_text_that_failed_alone_stays_failed() -> None:
    model = ScoresTwice(lambda _body, _seen: Answer("A story."), score_shift=lambda _tokens, _seen: -1.0)
    with model.serve() as url:
        (case,) = ask(url, SCORED, perplexity={"prose": 1.5})["cases"]
    assert case["verdict"] == "fail"
    assert case["reason"].startswith("perplexity ")


def test_numbers_that_are_none_are_told_as_null() -> None:
    (case,) = measured(-math.inf, perplexity={"prose": 1.5})["cases"]
    assert case["verdict"] == "fail"
    assert case["measured"]["perplexity"] is None
    json.dumps(case, allow_nan=False)


def test_without_a_limit_a_text_is_measured_and_no_pass() -> None:
    (case,) = measured()["cases"]
    assert case["verdict"] == "could-not-run"
    assert case["measured"]["perplexity"] == pytest.approx(1.28, abs=0.1)
    first, _, limit = case["reason"].partition("; or, which sees less, set gates.perplexity: {prose: ")
    assert "deploy once with gates_bootstrap=true" in first
    # Taken literally, the advice must hold.
    assert measured(perplexity={"prose": float(limit.partition("}")[0])})["ok"]


def recorded(**settings: Any) -> dict[str, Any]:
    """What a first deploy of the scripted model records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p__reference.json"
        reference.add(path, measured(bootstrap=True, **settings)["to_record"], stack="vllm-1")
        return reference.load(path)


def test_a_first_deploy_records_what_later_ones_are_held_to(tmp_path: Path) -> None:
    path = tmp_path / "baselines/p__reference.json"
    first = measured(bootstrap=True)
    assert first["ok"]
    assert reference.add(path, first["to_record"], stack="vllm-1") == ["prose"]
    assert path.stat().st_mode & 0o777 == 0o600
    record = reference.load(path)
    assert record["prose"]["stack"] == "vllm-1"
    assert len(record["prose"]["logprobs"]) == first["cases"][0]["measured"]["tokens"]
    again = measured(recorded=record)
    assert again["ok"]
    value = first["cases"][0]["measured"]["perplexity"]
    assert again["cases"][0]["measured"]["limit"] == pytest.approx(value * REFERENCE_ROOM)
    assert again["cases"][0]["measured"]["drift"]["max"] < 1e-6
    worse = measured(-0.06, recorded=record, bootstrap=True)  # 6 %: asking for a first deploy again changes nothing
    assert worse["cases"][0]["verdict"] == "fail"
    assert again["to_record"] == {}
    assert reference.load(path) == record


def test_a_reference_holds_from_both_sides() -> None:
    (case,) = measured(0.06, recorded=recorded())["cases"]
    assert case["verdict"] == "fail"
    assert case["reason"].startswith("perplexity 1.2") and "wanted at least" in case["reason"]


def test_tokens_that_move_against_each_other_are_seen() -> None:
    """The perplexity stays what it was."""
    record = recorded()
    moved = [value + (0.3 if n % 2 else -0.3) for n, value in enumerate(record["prose"]["logprobs"])]
    suite = yaml.safe_load(yaml.safe_dump(SCORED))
    suite["cases"][0]["score"]["drift"] = {"mean": 0.1, "max": 0.2}
    with ScriptedModel(lambda _body, _seen: Answer("A story.")).serve() as url:
        (case,) = ask(url, suite, recorded={"prose": {**record["prose"], "logprobs": moved}})["cases"]
    assert case["verdict"] == "fail"
    differ = "log probabilities differ by 0.3 nats at most, wanted 0.2"
    assert case["reason"] == f"the text and its reference (this host's record): {differ}"


def test_a_perplexity_within_the_room_passes() -> None:
    record = recorded()
    assert measured(0.04, recorded=record)["ok"]
    assert measured(-0.04, recorded=record)["ok"]


def test_a_small_move_of_every_token_is_seen_in_a_long_text() -> None:
    """Half up, half down: neither the perplexity nor a single token tells it, the mean does."""
    long = {"name": "s", "cases": [{"name": "prose", "score": {"text": "The ship came home. " * 10, "ceiling": 5}}]}
    with ScriptedModel(lambda _body, _seen: Answer("A story.")).serve() as url:
        entry = ask(url, long, bootstrap=True)["to_record"]["prose"]
        for move, verdict in ((0.05, "pass"), (0.15, "fail")):
            logprobs = [min(0.0, value + (move if n % 2 else -move)) for n, value in enumerate(entry["logprobs"])]
            (case,) = ask(url, long, recorded={"prose": {**entry, "logprobs": logprobs}})["cases"]
            assert (case["verdict"], len(logprobs) >= 30) == (verdict, True), case["reason"]


def test_a_private_text_is_told_by_its_numbers_alone() -> None:
    private = {"name": "s", "private": True, "cases": SCORED["cases"]}
    with ScriptedModel(lambda _body, _seen: Answer("A story.")).serve() as url:
        result = ask(url, private, bootstrap=True)
    entry = result.pop("to_record")["prose"]
    told = json.dumps(result)
    assert "ship" not in told and entry["identity"] not in told and str(entry["logprobs"][0]) not in told
    assert result["cases"][0]["measured"]["perplexity"] == pytest.approx(1.28, abs=0.1)


def test_other_template_arguments_are_another_text() -> None:
    def identity(prompt: bool, **arguments: Any) -> str:
        score = {"text": "Hello.", "ceiling": 5, **({"prompt": "Greet."} if prompt else {})}
        (case,) = parse_suite({"name": "s", "cases": [{"name": "a", "score": score}]}).cases
        assert isinstance(case, Score)
        return case.identity(arguments)

    assert identity(True, enable_thinking=False) != identity(True)
    assert identity(False, enable_thinking=False) == identity(False), "without messages there is no template"


@pytest.mark.parametrize(
    ("perplexity", "references", "reason"),
    [
        ({"prose": None}, {}, "gates.perplexity: prose: found None, wanted a number above 0"),
        ({"prose": math.nan}, {}, "gates.perplexity: prose: found nan"),
        ({"prose": "7.7"}, {}, "gates.perplexity: prose: found '7.7'"),
        ({"pros": 7.7}, {}, "gates.perplexity: pros: no scored text is called so; there are prose"),
        ({}, {"pros": {"identity": "x", "logprobs": [-1]}}, "gates.reference: pros: no scored text"),
        ({}, {"prose": {"identity": "x"}}, "prose: found ['identity']"),
    ],
)
def test_what_holds_nothing_is_refused(perplexity: Any, references: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        check_held([parse_suite(SCORED)], perplexity, references)


def test_a_text_that_is_not_scored_again_keeps_what_it_measured() -> None:
    with ScoresTwice(lambda _body, _seen: Answer("A story.")).serve() as url:
        (case,) = ask(url, SCORED, perplexity={"prose": 1.5})["cases"]
    assert case["verdict"] == "could-not-run"
    assert case["measured"]["perplexity"] == pytest.approx(1.28, abs=0.1)


def test_another_number_of_tokens_is_another_tokenizer() -> None:
    record = recorded()
    shorter = {"prose": {**record["prose"], "logprobs": record["prose"]["logprobs"][:-1]}}
    (case,) = measured(recorded=shorter)["cases"]
    assert (case["verdict"], case["measured"]["drift"]) == ("fail", None)
    assert "10 tokens, in its reference (this host's record) 9: another tokenizer" in case["reason"]


def test_a_reference_of_the_profile_counts_more_than_a_record() -> None:
    record = recorded()
    assert measured(references=record, recorded={"prose": {**record["prose"], "identity": "x"}})["ok"]
    other = {"prose": {**record["prose"], "identity": "x"}}
    (case,) = measured(references=other, recorded=record, perplexity={"prose": 1.5}, bootstrap=True)["cases"]
    assert case["verdict"] == "could-not-run"
    assert (
        "the profile's reference is of another text or other template arguments: take gates.reference out"
        in case["reason"]
    )


def test_a_limit_of_the_profile_is_enough_and_the_lower_one_counts() -> None:
    assert measured(perplexity={"prose": 1.5})["ok"]
    assert measured(perplexity={"prose": 1.5}, recorded=recorded())["ok"]
    assert not measured(perplexity={"prose": 1.1})["ok"]
    assert not measured(perplexity={"prose": 1.1}, recorded=recorded())["ok"]


def test_a_record_of_another_text_is_none_until_it_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "p__reference.json"
    path.write_text(reference.text({"prose": {"perplexity": 1.3, "identity": "x", "logprobs": [-0.1]}}))
    (case,) = measured(recorded=reference.load(path))["cases"]
    assert case["verdict"] == "could-not-run"
    assert (
        "this host's record is of another text or other template arguments: deploy once with gates_bootstrap"
        in case["reason"]
    )
    anew = measured(recorded=reference.load(path), bootstrap=True)
    assert anew["ok"]
    assert reference.add(path, anew["to_record"]) == ["prose"]
    assert measured(recorded={"prose": {"identity": "x", "logprobs": [-0.1]}}, perplexity={"prose": 1.5})["ok"]
    assert measured(recorded=reference.load(path))["ok"]


def test_a_first_deploy_is_no_free_pass() -> None:
    (case,) = measured(-2.0, bootstrap=True)["cases"]
    assert (case["verdict"], case["measured"]["limit"]) == ("fail", None)
    assert case["reason"].startswith("perplexity 9.")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "this is no record"),
        ("[]", "found list, wanted of each case identity and logprobs"),
        ('{"prose": {"perplexity": 1}}', "prose: found ['perplexity'], wanted"),
        ('{"prose": {"identity": "x", "logprobs": []}}', "prose: logprobs: wanted a list of numbers"),
        ('{"prose": {"identity": "x", "logprobs": [null]}}', "a list of numbers"),
        ('{"prose": {"identity": "x", "logprobs": [NaN]}}', "a list of numbers"),
        ('{"prose": {"identity": "x", "logprobs": [0.5]}}', "none above 0"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "p__reference.json"
    assert reference.load(path) == {}
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(reason)):
        reference.load(path)


def test_a_needle_that_fits_beside_no_answer_is_left_out_and_not_failed() -> None:
    cases = parse_suite(
        {"name": "s", "cases": [{"name": "all", "needle": {"lengths": ["served"], "depths": [0.5]}}]}
    ).cases
    assert len(coherence.longer_than_served(cases, 2048, 4096)) == 1
    assert coherence.longer_than_served(cases, 8192, 4096) == {}
    assert coherence.longer_than_served(cases, None, 4096) == {}
