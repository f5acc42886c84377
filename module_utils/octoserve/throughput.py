"""The throughput gate: trials of one prompt against a server, and the verdict on them.

Decode rate = tokens after the first event of the stream / time from the first to the last event, so without
the time to first token. Tokens are the server's ``usage``: a stream may carry several in one event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import student_t
from .openai_api import ApiError, Chunk, Client, join_chunks

PASSED = "pass"
FAILED = "fail"
REGRESSION = "regression"
COULD_NOT_RUN = "could-not-run"

COUNTING_PROMPT = "Count from 1 to 50, writing each number on a new line."
# No model decodes one request at more than 5,000 events a second. Where more than a share of the events came faster
# than that from the first on, the first was held back with them (by a proxy that buffers, or a client that got no
# processor), and the rate of what is left would be far too high.
FASTEST_GAP_S, BURST_SHARE = 0.0002, 0.25
# Tokens that are in `usage` without text: the end of the answer and of its reasoning.
SILENT_TOKENS = 4


class MeasurementError(Exception):
    """A stream that answers cannot be measured by: its counts do not hold."""


class HeldBackError(MeasurementError):
    """The stream's beginning came in one piece; another trial may do better."""


@dataclass(frozen=True)
class Trial:
    """One measured request. Times in seconds, rates in tokens per second."""

    completion_tokens: int
    events: int
    ttft_s: float
    total_s: float
    decode_tok_s: float
    end_to_end_tok_s: float


@dataclass(frozen=True)
class Limits:
    """What a deployment must reach. ``expected_tokens`` None: the answer's length is not known beforehand."""

    floor_tok_s: float
    expected_tokens: int | None = None


def measure(chunks: Sequence[Chunk]) -> Trial:
    """Measure one stream. Raises MeasurementError where usage is missing or contradicts the stream.

    The event with the finish reason counts: it is when the end token was decoded. The first event holds
    ``tokens / events`` tokens on average, so ``tokens * (1 - 1 / events)`` came after it: exact for one token
    an event, and without bias where a server sends several.
    """
    answer = join_chunks(chunks)
    events = [c for c in chunks if c.text or c.reasoning or c.tool_calls or c.finish_reason]
    if len(events) < 2:
        raise MeasurementError(f"the stream has {len(events)} events with text, wanted at least 2")
    if answer.usage is None:
        raise MeasurementError("the stream holds no usage, so its tokens cannot be counted")
    tokens = answer.usage.completion_tokens
    # An event may be the finish reason alone, and no token is shorter than a byte.
    fewest = len(events) - 1
    most = len((answer.text + answer.reasoning).encode()) + SILENT_TOKENS
    if not answer.tool_calls and not fewest <= tokens <= most:
        raise MeasurementError(
            f"usage claims {tokens} completion tokens, the stream holds at least {fewest} and at most {most}"
        )
    first, last, total = events[0].at, events[-1].at, chunks[-1].at
    if last <= first:
        raise MeasurementError(f"all {len(events)} events arrived at once: the answer was not streamed")
    burst = max(n for n, event in enumerate(events) if event.at - first <= n * FASTEST_GAP_S)
    if burst > BURST_SHARE * len(events):
        raise HeldBackError(
            f"{burst + 1} of {len(events)} events came in {1000 * (events[burst].at - first):.1f} ms: the "
            "stream was held back, by a proxy that buffers or a machine too busy to read it, and shows no decode rate"
        )
    return Trial(
        completion_tokens=tokens,
        events=len(events),
        ttft_s=first,
        total_s=total,
        decode_tok_s=tokens * (1 - 1 / len(events)) / (last - first),
        end_to_end_tok_s=tokens / total,
    )


def run_trials(
    client: Client,
    *,
    trials: int,
    warmup: int = 1,
    prompt: str = COUNTING_PROMPT,
    max_tokens: int = 512,
    options: Mapping[str, Any] | None = None,
) -> list[Trial]:
    """Ask a prompt ``warmup`` times unmeasured, then until ``trials`` are measured.

    As many streams that were held back are asked again. Raises ApiError, MeasurementError.
    """
    messages = [{"role": "user", "content": prompt}]
    for _ in range(warmup):
        client.stream_chat(messages, max_tokens, **(options or {}))
    measured: list[Trial] = []
    held_back = 0
    while len(measured) < trials:
        try:
            measured.append(measure(client.stream_chat(messages, max_tokens, **(options or {}))))
        except HeldBackError:
            held_back += 1
            if held_back > trials:
                raise
    return measured


def summarize(trials: Sequence[Trial]) -> dict[str, Any]:
    """Means over trials as ``summary.json`` holds them, the spread of each in ``details``."""
    decode, end_to_end, ttft = (
        student_t.summarize(values)
        for values in (
            [trial.decode_tok_s for trial in trials],
            [trial.end_to_end_tok_s for trial in trials],
            [trial.ttft_s * 1000 for trial in trials],
        )
    )
    return {
        "decode_tok_s": decode,
        "ttft_ms": ttft["mean"],
        "end_to_end_tok_s": end_to_end["mean"],
        "details": {"ttft_ms": ttft, "end_to_end_tok_s": end_to_end},
        "completion_tokens": trials[0].completion_tokens,
        "trials": [asdict(trial) for trial in trials],
    }


def judge(
    trials: Sequence[Trial], limits: Limits, baseline: Mapping[str, Any], fail_on_regression: bool
) -> dict[str, Any]:
    """``{"ok", "verdict", "reason"}`` of measured trials. Below the floor is never ok.

    ``baseline`` is what ``baseline.compare`` found. A regression is ok where it only warns.
    """
    counts = sorted({trial.completion_tokens for trial in trials})
    if limits.expected_tokens is not None and counts != [limits.expected_tokens]:
        found = ", ".join(map(str, counts))
        return _verdict(FAILED, f"answers of {found} tokens, wanted exactly {limits.expected_tokens}")
    mean = student_t.summarize([trial.decode_tok_s for trial in trials])["mean"]
    if mean < limits.floor_tok_s:
        return _verdict(FAILED, f"{mean:.2f} tok/s, the floor of the profile is {limits.floor_tok_s:g}")
    if baseline["regression"]:
        reason = (
            f"{mean:.2f} tok/s, {-baseline['change']:.1%} slower than the mean {baseline['mean']:.2f} of "
            f"{baseline['starts']} earlier starts; alarm below {baseline['alarm_below']:.2f}"
        )
        return {"ok": not fail_on_regression, "verdict": REGRESSION, "reason": reason}
    return {"ok": True, "verdict": PASSED, "reason": ""}


def could_not_run(reason: str) -> dict[str, Any]:
    """The result of a gate that measured nothing."""
    return {
        **_verdict(COULD_NOT_RUN, reason),
        "decode_tok_s": None,
        "ttft_ms": None,
        "end_to_end_tok_s": None,
        "details": {},
        "completion_tokens": None,
        "trials": [],
        "baseline": None,
    }


def describe(result: Mapping[str, Any]) -> str:
    """The result in a line or two for people."""
    if not result["trials"]:
        return f"throughput: {result['verdict']}: {result['reason']}"
    decode, baseline = result["decode_tok_s"], result["baseline"]
    spread = "" if decode["ci95"] is None else " (95 % {:.2f} to {:.2f})".format(*decode["ci95"])
    if baseline["alarm_below"] is None:
        against = f"{baseline['starts']} earlier starts: only the floor counts"
    else:
        against = (
            f"mean of {baseline['starts']} earlier starts {baseline['mean']:.2f}, "
            f"smallest slowdown that raises the alarm {baseline['smallest_slowdown']:.1%}"
        )
    line = (
        f"throughput: {result['verdict']}: decode {decode['mean']:.2f} tok/s{spread} over {decode['n']} trials, "
        f"TTFT {result['ttft_ms']:.0f} ms, end to end {result['end_to_end_tok_s']:.2f} tok/s; {against}"
    )
    return f"{line}\n{result['reason']}" if result["reason"] else line


def gate(
    client: Client,
    limits: Limits,
    compare: Callable[[float], dict[str, Any]],
    fail_on_regression: bool = False,
    **request: Any,
) -> dict[str, Any]:
    """Measure and judge; what cannot be measured is ``could-not-run``, no exception.

    ``compare`` compares a mean (tok/s) with the baseline; ``request`` are the arguments of ``run_trials``.
    """
    try:
        measured = run_trials(client, **request)
    except (ApiError, MeasurementError) as error:
        return could_not_run(str(error))
    summary = summarize(measured)
    baseline = compare(summary["decode_tok_s"]["mean"])
    return {**judge(measured, limits, baseline, fail_on_regression), **summary, "baseline": baseline}


def _verdict(verdict: str, reason: str) -> dict[str, Any]:
    return {"ok": False, "verdict": verdict, "reason": reason}
