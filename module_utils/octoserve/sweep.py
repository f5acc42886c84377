"""Measures one load of the throughput gate: a mix of requests, or a point of a sweep over concurrency or context."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from . import latency, load, trial
from .openai_api import ApiError, Client, join_chunks
from .patience import patiently
from .prompts import Sizing, Writer
from .sweep_plan import TOLERANCE, Point

# Prompts are sized to TOLERANCE; one that is cut by the server is far shorter.
ALLOWED = 4 * TOLERANCE
# A server that was only slow gives a new request its first token within this time.
PROBE_TIMEOUT_S = 60.0


def left_out(point: Point, reason: str) -> dict[str, Any]:
    """The result of a point that was not measured."""
    return _result(point, load.Load([], load.total([])), [], failed=0, cut=0, reason=reason)


def run(
    client: Client, point: Point, seconds: float, *, writer: Writer, sizing: Sizing, options: Mapping[str, Any]
) -> tuple[dict[str, Any], load.Cost]:
    """Measure a point within ``seconds``. Returns its result and what the generator spent on it.

    Requests that were cut did not fail, unless the server then has no token for a new one either.
    """
    # Answers of a fixed length: they are not judged here, and a short one would measure the model's mood.
    prompts = [
        load.Prompt(writer.text(sizing.words(prompt)), answer, {**options, "ignore_eos": True})
        for prompt, answer in point.sizes
    ]
    done = load.run(client, prompts, point.concurrency, seconds)
    measured, errors = [], []
    longest = max(answer for _, answer in point.sizes)
    for answer in done.answers:
        if answer.error and not answer.cut:
            errors.append(answer.error)
        elif not answer.cut:
            try:
                measured.append((answer, trial.measure(answer.chunks, bursts=True, at_most=longest)))
            except trial.MeasurementError as error:
                errors.append(str(error))
    if wrong := other_context(point, [answer for answer, _ in measured]):
        errors += [wrong] * len(measured)
        measured = []
    cut = sum(answer.cut for answer in done.answers)
    if cut and (silence := no_token(client, options)):
        errors += [f"{cut} of {len(done.answers)} requests were cut at {seconds:g} s, and {silence}"] * cut
        cut = 0
    reasons = [f"{len(errors)} of {len(done.answers)} requests failed, the first with: {errors[0]}"] if errors else []
    if len(measured) + len(errors) < len(prompts):
        reasons.append(f"cut short at {seconds:g} s with {len(measured)} of {len(prompts)} requests finished")
    if done.cost.bottleneck:
        reasons.append(f"the load generator was the bottleneck: {done.cost.busy:.0%} of a core")
    return _result(point, done, measured, failed=len(errors), cut=cut, reason="; ".join(reasons)), done.cost


def no_token(client: Client, options: Mapping[str, Any]) -> str:
    """How a server that hangs fails to answer the shortest request; empty where it answers."""
    bounded = client.with_timeout(PROBE_TIMEOUT_S)
    try:
        patiently(lambda: bounded.chat([{"role": "user", "content": "Hello"}], 1, **options))
    except ApiError as error:
        return f"a new request then got no token within {PROBE_TIMEOUT_S:g} s: {error}"
    return ""


def other_context(point: Point, answers: Sequence[load.Answer]) -> str:
    """Why prompts were not of the point's context, by the server's own count; empty where they were."""
    usages = [usage for answer in answers if (usage := join_chunks(answer.chunks).usage)]
    found = [usage.prompt_tokens for usage in usages if usage.prompt_tokens < (1 - ALLOWED) * point.context_tokens]
    return f"a prompt of {found[0]} tokens came, wanted {point.context_tokens}" if found else ""


def _result(
    point: Point,
    done: load.Load,
    measured: Sequence[tuple[load.Answer, trial.Trial]],
    *,
    failed: int,
    cut: int,
    reason: str,
) -> dict[str, Any]:
    """A point as summary.json holds it; numbers of requests that finished, None where none did."""
    trials = [one for _, one in measured]
    usages = [join_chunks(answer.chunks).usage for answer, _ in measured]
    prompt_tokens = [usage.prompt_tokens for usage in usages if usage]
    even = [one for answer, one in measured if not trial.burst_events(trial.event_times(answer.chunks))]
    waits = [gap for answer, _ in measured for gap in trial.gaps(answer.chunks)]
    span = max(a.ended for a, _ in measured) - min(a.started for a, _ in measured) if measured else 0.0
    return {
        "sweep": point.sweep,
        "concurrency": point.concurrency,
        "context_tokens": point.context_tokens,
        "prompt_tokens": statistics.fmean(prompt_tokens) if prompt_tokens else None,
        "requests": len(done.answers),
        "failed": failed,
        "cut": cut,
        "retries": sum(answer.retries for answer in done.answers),
        "seconds": done.cost.seconds,
        "output_tok_s": sum(one.completion_tokens for one in trials) / span if span > 0 else None,
        "decode_tok_s": statistics.fmean(one.decode_tok_s for one in even) if even else None,
        "end_to_end_tok_s": statistics.fmean(one.end_to_end_tok_s for one in trials) if trials else None,
        "ttft_ms": latency.percentiles_ms([one.ttft_s for one in trials]),
        "itl_ms": latency.percentiles_ms(waits),
        "generator_busy": done.cost.busy,
        "reason": reason,
    }
