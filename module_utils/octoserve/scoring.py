"""Teacher-forced log probabilities: how likely a model finds given tokens, and how far two computations differ.

Greedy text may differ on a healthy server, whose sums run in another order under load; the log probabilities of the
same tokens may not, beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .coherence_suite import Bound, Score
from .openai_api import Client

MEAN_TOKENS = 30  # of fewer, one token moves the mean by more than a bound leaves
DIGITS = 6  # of a log probability that is kept


def tokens_of(client: Client, case: Score, chat_template_args: Mapping[str, Any]) -> tuple[list[int], int]:
    """Token ids of a case, and how many of them are given and not scored. Raises ApiError."""
    if not case.messages:
        return client.tokenize(prompt=case.text), 1
    template = {"chat_template_kwargs": dict(chat_template_args)} if chat_template_args else {}
    given = client.tokenize(messages=list(case.messages), add_generation_prompt=True, **template)
    return given + client.tokenize(prompt=case.text, add_special_tokens=False), len(given)


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log probability (nats); infinite where one is no number."""
    mean = math.fsum(logprobs) / len(logprobs)
    return math.exp(min(-mean, 700.0)) if math.isfinite(mean) else math.inf


def difference(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Mean and largest absolute difference (nats); infinite where one is no number."""
    apart = [abs(a - b) for a, b in zip(first, second)]
    apart = [value if math.isfinite(value) else math.inf for value in apart]
    return {"mean": math.fsum(apart) / len(apart), "max": max(apart)}


def exceeds(apart: Mapping[str, float], bound: Bound, tokens: int) -> str:
    """Why a difference of so many tokens is too large, in words; empty where it is not."""
    if tokens < MEAN_TOKENS:
        at_most = f"log probabilities differ by {apart['max']:.3g} nats at most, wanted {bound.max:g}"
        return "" if apart["max"] <= bound.max else at_most
    if apart["mean"] <= bound.mean and apart["max"] <= bound.max:
        return ""
    return (
        f"log probabilities differ by {apart['mean']:.3g} nats on average and {apart['max']:.3g} at most, "
        f"wanted {bound.mean:g} and {bound.max:g}"
    )


def told(value: Any) -> Any:
    """A measurement as JSON can hold it: a number that is infinite becomes None."""
    if isinstance(value, Mapping):
        return {key: told(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
