"""One answer three ways: whole, as a stream, and its tokens computed again as a prompt.

A whole and a streamed answer at temperature 0 hold the same text, or part where two tokens were as good as equal.
Decoding (one token a step, from the KV cache and CUDA graphs) and prefill (all tokens at once) are two computations of
the same log probabilities, so a stale cache, graph or position shows in their difference, without a reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import scoring
from .answer_checks import well_formed
from .coherence_suite import Agreement
from .openai_api import Client, Completion, join_chunks

TOP = 5  # alternatives of a token in which the other answer's token is looked for
SILENT_TOKENS = 1  # the end of an answer may come without an event of its own


@dataclass(frozen=True)
class Agreed:
    """The whole answer and what was measured. ``reason``: why the ways disagree; ``missing``: why nobody knows."""

    answer: Completion
    reason: str = ""
    missing: str = ""
    measured: Mapping[str, Any] | None = None


def ask(client: Client, case: Agreement, options: Mapping[str, Any]) -> Agreed:
    """Ask all three ways. Raises ApiError."""
    asked = {**options, "logprobs": True, "top_logprobs": TOP, "return_token_ids": True}
    whole = client.chat(case.messages, case.max_tokens, **asked)
    streamed = join_chunks(client.stream_chat(case.messages, case.max_tokens, **asked))
    if reason := well_formed(said(whole)) or well_formed(said(streamed)):
        return Agreed(whole, reason)
    if not whole.tokens or len(whole.tokens) != len(whole.token_ids) or not whole.prompt_token_ids:
        return Agreed(
            whole, missing="the server sent no log probability and id of each token, so nothing can be compared"
        )
    reason, parted = compare(whole, streamed, case.tie)
    given = list(whole.prompt_token_ids)
    again = client.prompt_logprobs(given + list(whole.token_ids))[len(given) - 1 :]
    apart = scoring.difference([token.logprob for token in whole.tokens], again)
    measured = scoring.told(
        {"against_prefill": apart, "bound": vars(case.bound), "tokens": len(whole.tokens), "stream": parted}
    )
    if not reason and (too_far := scoring.exceeds(apart, case.bound, len(whole.tokens))):
        reason = f"decoded, and computed again from its tokens, the answer's {too_far}"
    return Agreed(whole, reason, measured=measured)


def compare(whole: Completion, streamed: Completion, tie: float) -> tuple[str, str]:
    """Why a streamed answer contradicts the whole one (empty: it does not), and where the two part."""
    if said(whole) == said(streamed):
        return "", "same"
    sent, counted = len(streamed.token_ids), streamed.usage.completion_tokens if streamed.usage else 0
    if sent < counted - SILENT_TOKENS:
        return f"the stream brought {sent} of {counted} tokens: {said(streamed)[:80]!r}", "tokens lost"
    for number, (token, mine, theirs) in enumerate(zip(whole.tokens, whole.token_ids, streamed.token_ids)):
        if mine != theirs:
            other = streamed.tokens[number].text if number < len(streamed.tokens) else ""
            gap = token.logprob - token.top.get(other, -math.inf)
            if gap <= tie:
                return "", f"tie at token {number + 1}"
            return (
                f"token {number + 1} is {token.text!r} in the whole answer and {other!r} in the stream, no tie: "
                f"{gap:.3g} nats apart",
                f"token {number + 1}",
            )
    return f"the same tokens are another text in the stream: {said(streamed)[:80]!r}", "same tokens"


def said(answer: Completion) -> str:
    """Reasoning and answer: of a model that thinks, a short limit may leave no answer, and both are to agree."""
    return answer.reasoning + answer.text
