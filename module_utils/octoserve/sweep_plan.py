"""Which loads the throughput gate measures beside the counting prompt, and which of them a server does not allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from .prompts import Writer

MIX, CONCURRENCY, CONTEXT = "mix", "concurrency", "context"
SEED = 20261130
# A prompt is sized by words; so much longer or shorter than asked for it may turn out.
TOLERANCE = 0.05
SHORT_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Mix:
    """Requests of varied lengths, several at once; lengths are drawn between two ends, short ones more often."""

    concurrency: int = 4
    requests: int = 24
    prompt_tokens: Sequence[int] = (16, 2048)
    answer_tokens: Sequence[int] = (16, 256)


@dataclass(frozen=True)
class Settings:
    """``gates.throughput.sweeps`` of a profile. ``context`` 0 is a short prompt; ``requests`` is for each stream."""

    point_seconds: float = 30.0
    answer_tokens: int = 128
    requests: int = 3
    concurrency: Sequence[int] = (1, 4, 16, 32)
    context: Sequence[int] = (0, 8192, 32768)
    mix: Mix = field(default_factory=Mix)


@dataclass(frozen=True)
class Served:
    """What the server takes: tokens of prompt and answer together, requests at once. None: not known."""

    max_model_len: int | None
    max_num_seqs: int | None


@dataclass(frozen=True)
class Point:
    """One load to measure: ``sizes`` are the tokens of each prompt and its answer."""

    sweep: str
    concurrency: int
    context_tokens: int
    sizes: Sequence[tuple[int, int]]

    @property
    def name(self) -> str:
        """What people call it."""
        if self.sweep == CONTEXT:
            return f"context {self.context_tokens or 'short'}"
        return MIX if self.sweep == MIX else f"concurrency {self.concurrency}"


def parse(given: Mapping[str, Any]) -> Settings:
    """Settings from what a profile says; what it leaves out has its default. Raises ValueError with every mistake."""
    mistakes = _mistakes("sweeps", given, _SETTINGS) or _mistakes("sweeps.mix", given.get("mix", {}), _MIX)
    if mistakes:
        raise ValueError("; ".join(mistakes))
    return Settings(**{**given, "mix": Mix(**given.get("mix", {}))})


def plan(settings: Settings) -> list[Point]:
    """The points in the order in which they are measured."""
    mix, answer = settings.mix, settings.answer_tokens
    lengths = Writer(SEED).random
    sizes = []
    for _ in range(mix.requests):
        # Log-uniform, as lengths of real requests are nearer to than to uniform ones.
        prompt, wanted = (
            low * (high / low) ** lengths.random() for low, high in (mix.prompt_tokens, mix.answer_tokens)
        )
        sizes.append((round(prompt), round(wanted)))
    points = [Point(MIX, mix.concurrency, 0, sizes)] if sizes else []
    for streams in settings.concurrency:
        requests = streams * settings.requests
        points.append(Point(CONCURRENCY, streams, 0, [(SHORT_PROMPT_TOKENS, answer)] * requests))
    for context in settings.context:
        tokens = context or SHORT_PROMPT_TOKENS
        points.append(Point(CONTEXT, 1, context, [(tokens, answer)] * settings.requests))
    return points


def obstacle(point: Point, served: Served) -> str:
    """Why a point cannot be measured; empty where it can."""
    if served.max_num_seqs is not None and point.concurrency > served.max_num_seqs:
        return f"left out: the profile serves at most {served.max_num_seqs} requests at once (max-num-seqs)"
    longest = max(round(prompt * (1 + TOLERANCE)) + answer for prompt, answer in point.sizes)
    if served.max_model_len is not None and longest > served.max_model_len:
        return (
            f"left out: prompt and answer take up to {longest} tokens, the server takes {served.max_model_len} "
            "(max_model_len)"
        )
    return ""


def _mistakes(where: str, given: Any, rules: Mapping[str, _Rule]) -> list[str]:
    """What is wrong with one mapping of settings."""
    if not isinstance(given, Mapping):
        return [f"{where} is {given!r}, wanted a mapping"]
    return [f"unknown key {where}.{key}" for key in given if key not in rules] + [
        f"{where}.{key} is {given[key]!r}, wanted {wanted}"
        for key, (holds, wanted) in rules.items()
        if key in given and not holds(given[key])
    ]


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _list(values: Any, least: int = 1) -> bool:
    return isinstance(values, (list, tuple)) and all(_whole(value, least) for value in values)


def _range(values: Any) -> bool:
    return _list(values) and len(values) == 2 and values[0] <= values[1]


_Rule = tuple[Callable[[Any], bool], str]
_NUMBER: _Rule = (_whole, "a whole number from 1 on")
_RANGE: _Rule = (_range, "two whole numbers from 1 on, the smaller one first")
_SETTINGS: dict[str, _Rule] = {
    "point_seconds": (lambda value: _whole(value) or (isinstance(value, float) and value > 0), "seconds, more than 0"),
    "answer_tokens": _NUMBER,
    "requests": _NUMBER,
    "concurrency": (_list, "a list of whole numbers from 1 on"),
    "context": (lambda value: _list(value, 0), "a list of whole numbers, 0 for a short prompt"),
    "mix": (lambda value: isinstance(value, Mapping), "a mapping"),
}
_MIX: dict[str, _Rule] = {
    "concurrency": _NUMBER,
    "requests": (lambda value: _whole(value, 0), "a whole number, 0 for no mix"),
    "prompt_tokens": _RANGE,
    "answer_tokens": _RANGE,
}
