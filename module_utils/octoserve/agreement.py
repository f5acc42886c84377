"""One answer three ways: whole, as a stream, and its tokens computed again as a prompt.

A whole and a streamed answer at temperature 0 hold the same text, or part where two tokens were as good as equal; each
of their tokens is the likeliest. Decoding (one token a step, from the KV cache and CUDA graphs) and prefill (all tokens
at once) are two computations of the same log probabilities, so a stale cache, graph or position shows in their
difference, without a reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import scoring
from .answer_checks import well_formed
from .coherence_suite import Agreement
from .openai_api import Client, Completion, Token, join_chunks

SAME = "same"  # where the streamed answer parts from the whole one: nowhere
TOP = 5  # alternatives of a token in which the other answer's token is looked for
SILENT_TOKENS = 1  # the end of an answer may come without an event of its own
# A model's own generation_config may name penalties, with which the likeliest token is not the one that is taken.
PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Agreed:
    """The whole answer and what was measured. ``reason``: why the ways disagree; ``missing``: why nobody knows."""

    answer: Completion
    reason: str = ""
    missing: str = ""
    measured: Mapping[str, Any] | None = None


def ask(client: Client, case: Agreement, options: Mapping[str, Any]) -> Agreed:
    """Ask all three ways. Raises ApiError."""
    asked = {**options, "logprobs": True, "top_logprobs": TOP, "return_token_ids": True, **PLAIN}
    whole = client.chat(case.messages, case.max_tokens, **asked)
    streamed = join_chunks(client.stream_chat(case.messages, case.max_tokens, **asked))
    if reason := well_formed(said(whole)) or well_formed(said(streamed)):
        return Agreed(whole, reason)
    if not whole.tokens or len(whole.tokens) != len(whole.token_ids) or not whole.prompt_token_ids:
        return Agreed(
            whole, missing="the server sent no log probability and id of each token, so nothing can be compared"
        )
    reason, parted = compare(whole, streamed, case.tie)
    reason = reason or not_likeliest("whole", whole, case.tie) or not_likeliest("streamed", streamed, case.tie)
    given = list(whole.prompt_token_ids)
    reason = reason or miscounted("whole", whole, len(given)) or miscounted("streamed", streamed, len(given))
    apart = {"whole": against_prefill(client, given, whole)}
    if parted != SAME and is_complete(streamed):
        apart["streamed"] = against_prefill(client, given, streamed)
    for way, found in apart.items():
        if not reason and (too_far := scoring.exceeds(found, case.bound, len(whole.tokens))):
            reason = f"decoded, and computed again from its tokens, the {way} answer's {too_far}"
    measured = {
        "against_prefill": apart["whole"],
        "streamed_against_prefill": apart.get("streamed"),
        "bound": vars(case.bound),
        "tokens": len(whole.tokens),
        "stream": parted,
    }
    return Agreed(whole, reason, measured=scoring.told(measured))


def against_prefill(client: Client, given: list[int], answer: Completion) -> dict[str, float]:
    """How far the log probabilities of an answer's tokens lie from those of the same tokens as a prompt (nats)."""
    again = client.prompt_logprobs(given + list(answer.token_ids))[len(given) - 1 :]
    return scoring.difference([token.logprob for token in answer.tokens], again)


def is_complete(streamed: Completion) -> bool:
    """Whether a stream brought each token of its answer: a parser may keep the end of the reasoning to itself."""
    counted = streamed.usage.completion_tokens if streamed.usage else -1
    return len(streamed.tokens) == len(streamed.token_ids) == counted


def not_likeliest(way: str, answer: Completion, tie: float) -> str:
    """Which token of an answer at temperature 0 another one surpasses by more than a tie (nats); else empty."""
    for number, token in enumerate(answer.tokens):
        best = max(token.top, key=token.top.__getitem__, default="")
        gap = token.top.get(best, token.logprob) - token.logprob
        if gap > tie:
            return (
                f"token {number + 1} of the {way} answer is {token.text!r}, though {best!r} is {gap:.3g} nats likelier"
            )
    return ""


def miscounted(way: str, answer: Completion, prompt: int) -> str:
    """Where ``usage`` does not count the tokens of the prompt and those that the answer holds; else empty."""
    told, sent = answer.usage, len(answer.token_ids)
    if told is None or (told.prompt_tokens == prompt and abs(told.completion_tokens - sent) <= SILENT_TOKENS):
        return ""
    found = f"{told.prompt_tokens} and {told.completion_tokens} tokens of prompt and answer"
    return f"usage of the {way} answer counts {found}, they are {prompt} and {sent}"


def compare(whole: Completion, streamed: Completion, tie: float) -> tuple[str, str]:
    """Why a streamed answer contradicts the whole one (empty: it does not), and where the two part."""
    if said(whole) == said(streamed):
        return "", SAME
    sent, counted = len(streamed.token_ids), streamed.usage.completion_tokens if streamed.usage else 0
    if sent < counted - SILENT_TOKENS:
        return f"the stream brought {sent} of {counted} tokens: {said(streamed)[:80]!r}", "tokens lost"
    for number, (token, mine, theirs) in enumerate(zip(whole.tokens, whole.token_ids, streamed.token_ids)):
        if mine != theirs:
            other = streamed.tokens[number] if number < len(streamed.tokens) else Token("", -math.inf)
            # A tie in one of the two runs: each rounded in its own way.
            gap = min(lead(token, other.text), lead(other, token.text))
            if gap <= tie:
                return "", f"tie at token {number + 1}"
            return (
                f"token {number + 1} is {token.text!r} in the whole answer and {other.text!r} in the stream, no tie: "
                f"{gap:.3g} nats apart",
                f"token {number + 1}",
            )
    if said(whole).split() == said(streamed).split():  # a parser may strip a line's end in one of the two ways
        return "", SAME
    return f"the same tokens are another text in the stream: {said(streamed)[:80]!r}", "same tokens"


def lead(token: Token, other: str) -> float:
    """How much likelier a token was than another one (nats), infinite where that is not among its alternatives."""
    return token.logprob - token.top.get(other, -math.inf)


def said(answer: Completion) -> str:
    """Reasoning and answer: of a model that thinks, a short limit may leave no answer, and both are to agree."""
    return answer.reasoning + answer.text
