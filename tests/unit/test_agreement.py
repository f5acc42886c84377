"""One answer three ways: what is compared after a tie, that each token is the likeliest, and what usage counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from octoserve import agreement
from octoserve.agreement import Agreed
from octoserve.coherence_suite import Agreement
from octoserve.openai_api import Chunk, Client, Completion, Token, Usage

from tests.gates.scripted_faults import healthy
from tests.gates.scripted_model import ScriptedModel

CASE = Agreement(
    "a", messages=({"role": "user", "content": "Explain in about one hundred words why the sky is blue."},)
)
PROMPT = (1, 2, 3)


def answer(*tokens: Token) -> Completion:
    """An answer whose token ids are the numbers that its tokens name."""
    ids = tuple(int(token.text) for token in tokens)
    text = " ".join(token.text for token in tokens)
    return Completion(text, 0.1, usage=Usage(3, len(ids)), tokens=tokens, token_ids=ids, prompt_token_ids=PROMPT)


@dataclass
class FakeClient:
    """A server that answers what it is told to; log probabilities of a prompt's tokens are a hundredth of their ids."""

    whole: Completion
    streamed: Completion

    def chat(self, *_: Any, **__: Any) -> Completion:
        return self.whole

    def stream_chat(self, *_: Any, **__: Any) -> list[Chunk]:
        found = self.streamed
        return [
            Chunk(
                0.1, found.text, finish_reason="stop", usage=found.usage, tokens=found.tokens, token_ids=found.token_ids
            )
        ]

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        return [-number / 100 for number in ids[1:]]


def token(number: int, off: float = 0.0, top: Mapping[str, float] | None = None) -> Token:
    return Token(str(number), -number / 100 + off, {str(number): -number / 100 + off, **(top or {})})


def ask(whole: Completion, streamed: Completion) -> Agreed:
    return agreement.ask(FakeClient(whole, streamed), CASE, {})  # type: ignore[arg-type]  # what it asks of a client


TIE = {"8": -0.08, "9": -0.09}
WHOLE = answer(token(7), token(8, top=TIE), token(5))


def test_equal_answers_agree() -> None:
    found = ask(WHOLE, WHOLE)
    assert (found.reason, found.missing) == ("", "")
    assert found.measured is not None
    assert (found.measured["stream"], found.measured["streamed_against_prefill"]) == ("same", None)


def test_after_a_tie_the_streamed_tokens_are_computed_again() -> None:
    right = answer(token(7), token(9, top=TIE), token(6), token(4))
    found = ask(WHOLE, right)
    assert found.reason == ""
    assert found.measured is not None
    assert found.measured["stream"] == "tie at token 2"
    assert found.measured["streamed_against_prefill"]["max"] == pytest.approx(0, abs=1e-12)

    wrong = answer(token(7), token(9, top=TIE), token(6, off=-3), token(4, off=-3))
    assert "the streamed answer's log probabilities differ by 3 nats at most" in ask(WHOLE, wrong).reason


def test_a_stream_that_does_not_bring_each_token_is_not_computed_again() -> None:
    parser_kept_one = answer(token(7), token(9, top=TIE), token(6, off=-3))
    found = ask(WHOLE, replace(parser_kept_one, usage=Usage(3, 4)))
    assert found.reason == ""
    assert found.measured is not None
    assert found.measured["streamed_against_prefill"] is None


@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_each_token_is_the_likeliest(way: str) -> None:
    second_best = answer(token(7), token(8, top=TIE), token(5, top={"1": 0.6}))
    whole, streamed = (second_best, WHOLE) if way == "whole" else (WHOLE, second_best)
    assert ask(whole, streamed).reason == f"token 3 of the {way} answer is '5', though '1' is 0.65 nats likelier"
    tied = answer(token(7), token(8, top=TIE), token(5, top={"1": 0.4}))
    assert ask(tied, tied).reason == ""


@pytest.mark.parametrize("told", [Usage(4, 3), Usage(3, 5), Usage(3, 1)])
def test_usage_counts_what_is_there(told: Usage) -> None:
    wrong = replace(WHOLE, usage=told)
    assert "usage of the whole answer counts" in ask(wrong, WHOLE).reason
    assert "usage of the streamed answer counts" in ask(WHOLE, wrong).reason


def test_a_tie_in_one_of_the_two_runs_is_enough() -> None:
    in_the_whole = answer(token(7), token(8, top={"9": -0.08 - 0.7}), token(5))
    in_the_stream = answer(token(7), token(9, top={"8": -0.09 - 0.2}), token(6))
    assert ask(in_the_whole, in_the_stream).reason == ""
    far = answer(token(7), token(9, top={"8": -0.09 - 0.9}), token(6))
    assert "no tie: 0.7 nats apart" in ask(in_the_whole, far).reason


def test_the_same_tokens_with_other_spaces_agree() -> None:
    assert ask(WHOLE, replace(WHOLE, text=f"\n{WHOLE.text}")).reason == ""
    assert "the same tokens are another text" in ask(WHOLE, replace(WHOLE, text="other")).reason


def test_a_healthy_scripted_server_agrees() -> None:
    with ScriptedModel(healthy).serve() as url:
        found = agreement.ask(Client(url), CASE, {})
    assert (found.reason, found.missing) == ("", "")
