"""One streamed answer as a measurement: its rates, and what many of them say about the server.

Decode rate = tokens after the first event of the stream / time from the first to the last event, so without
the time to first token. Tokens are the server's ``usage``: a stream may carry several in one event.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .openai_api import Chunk, join_chunks

# No model decodes one request at more than 5,000 events a second. Where more than a share of the events came faster
# than that from the first on, the first was held back with them (by a proxy that buffers, or a client that got no
# processor), and the rate of what is left would be far too high.
FASTEST_GAP_S, BURST_SHARE = 0.0002, 0.25
# Tokens that are in `usage` without text: the end of the answer and of its reasoning.
SILENT_TOKENS = 4
# A stream that comes in larger pieces shows no decode rate: the last piece is shorter, and the end is one, too.
MOST_TOKENS_AN_EVENT = 10
# The steady rate cuts each trial into so many pieces and leaves out this share of all pieces at either end.
PIECES, TRIM = 3, 0.25


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
class SteadyRate:
    """What a start usually decodes, in tokens per second; ``stderr`` None where one piece shows no spread."""

    mean: float
    stderr: float | None


def event_times(chunks: Sequence[Chunk]) -> list[float]:
    """When each event that carries text, or the finish reason, arrived: the end token was decoded then."""
    return [c.at for c in chunks if c.text or c.reasoning or c.tool_calls or c.finish_reason]


def gaps(chunks: Sequence[Chunk]) -> list[float]:
    """Inter-token latencies of a stream in seconds: the times between its events."""
    times = event_times(chunks)
    return [later - earlier for earlier, later in zip(times, times[1:])]


def burst_events(times: Sequence[float]) -> int:
    """How many events came in one piece at the beginning; 0 where they are too few to spoil the decode rate."""
    burst = max(n for n, at in enumerate(times) if at - times[0] <= n * FASTEST_GAP_S)
    return burst + 1 if burst > BURST_SHARE * len(times) else 0


def measure(
    chunks: Sequence[Chunk], bursts: bool = False, at_most: int | None = None, limit: int | None = None
) -> Trial:
    """Measure one stream. Raises MeasurementError where usage is missing or contradicts the stream.

    The first event holds ``tokens / events`` tokens on average, so ``tokens * (1 - 1 / events)`` came after it: exact
    for one token an event, and without bias where a server sends several. ``bursts``: accept a stream whose
    beginning came in one piece, as it may where many are read at once; its decode rate says nothing. ``at_most``:
    tokens that were asked for with no regard to the end, of which a parser may hold further ends back. ``limit``:
    tokens that were asked for at most.
    """
    answer = join_chunks(chunks)
    times = event_times(chunks)
    events = len(times)
    if events < 2:
        raise MeasurementError(f"the stream has {events} events with text, wanted at least 2")
    if answer.usage is None:
        raise MeasurementError("the stream holds no usage, so its tokens cannot be counted")
    tokens = answer.usage.completion_tokens
    # An event may be the finish reason alone; no token is shorter than a byte, but one of the template has no text.
    fewest = events - 1
    without_text = sum(1 for c in chunks if not (c.text or c.reasoning or c.usage or c.finish_reason))
    most = len((answer.text + answer.reasoning).encode()) + max(SILENT_TOKENS, without_text)
    most = max(most, at_most or 0)
    if not answer.tool_calls and not fewest <= tokens <= most:
        raise MeasurementError(
            f"usage claims {tokens} completion tokens, the stream holds at least {fewest} and at most {most}"
        )
    limit = at_most if limit is None else limit
    if limit is not None and tokens > limit:
        raise MeasurementError(f"usage claims {tokens} completion tokens, {limit} were asked for at most")
    if at_most is None and tokens > MOST_TOKENS_AN_EVENT * events:
        raise MeasurementError(
            f"{tokens} tokens came in {events} events, too coarse to show a decode rate; wanted at most "
            f"{MOST_TOKENS_AN_EVENT} tokens an event (vLLM: --stream-interval)"
        )
    first, last, total = times[0], times[-1], chunks[-1].at
    if last <= first:
        raise MeasurementError(f"all {events} events arrived at once: the answer was not streamed")
    burst = burst_events(times)
    if burst and not bursts:
        raise HeldBackError(
            f"{burst} of {events} events came in {1000 * (times[burst - 1] - first):.1f} ms: the stream was held back, "
            "by a proxy that buffers or a machine too busy to read it, and shows no decode rate"
        )
    return Trial(
        completion_tokens=tokens,
        events=events,
        ttft_s=first,
        total_s=total,
        decode_tok_s=tokens * (1 - 1 / events) / (last - first),
        end_to_end_tok_s=tokens / total,
    )


def pieces(chunks: Sequence[Chunk]) -> list[float]:
    """Seconds a token of each piece of a stream; the pieces have the same number of events."""
    times, tokens = event_times(chunks), measure(chunks).completion_tokens
    count = min(PIECES, len(times) - 1)
    edges = [round(n * (len(times) - 1) / count) for n in range(count + 1)]
    return [(times[b] - times[a]) / (b - a) / tokens * len(times) for a, b in zip(edges, edges[1:])]


def steady_rate(streams: Sequence[Sequence[Chunk]]) -> SteadyRate:
    """The decode rate of a start that single disturbances do not move; every stream must measure.

    From the mean time of the middle half of all streams' pieces: a stall hits single pieces, and one that hits every
    stream still counts. Pieces and not gaps, because an event that is only delivered late is made up for by the next.
    """
    mean, stderr = trimmed_mean([piece for chunks in streams for piece in pieces(chunks)])
    return SteadyRate(1 / mean, None if stderr is None else stderr / mean**2)


def trimmed_mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean without a quarter of the values at either end, and its standard error (None for one value).

    The error comes from Winsorized deviations (Tukey and McLaughlin, Sankhya A 25, 1963).
    """
    ordered, cut = sorted(values), int(TRIM * len(values))
    kept = ordered[cut : len(ordered) - cut]
    mean = statistics.fmean(kept)
    if len(kept) < 2:
        return mean, None
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    squares = statistics.variance(winsorized) * (len(ordered) - 1)
    return mean, math.sqrt(squares / (len(kept) * (len(kept) - 1)))
