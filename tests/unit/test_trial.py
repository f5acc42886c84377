"""One stream as a measurement, and the steady rate of many: no count is believed unchecked."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octoserve import trial
from octoserve.openai_api import Chunk, Usage
from octoserve.trial import MeasurementError, measure


def stream(events: int, tokens: int, ttft: float = 0.2, gap: float = 0.01) -> list[Chunk]:
    """A stream of text events and a usage event: the last text event carries the finish reason."""
    last = events - 1
    chunks = [Chunk(ttft + gap * n, "10\n", finish_reason="stop" if n == last else None) for n in range(events)]
    return [Chunk(0.1), *chunks, Chunk(chunks[-1].at, usage=Usage(7, tokens))]


def test_decode_rate_leaves_out_the_time_to_first_token() -> None:
    trial = measure(stream(events=101, tokens=101, ttft=5.0, gap=0.01))
    assert trial.decode_tok_s == pytest.approx(100.0)
    assert trial.ttft_s == 5.0
    assert trial.end_to_end_tok_s == pytest.approx(101 / 6.0)


@given(st.integers(2, 60), st.integers(1, 3))
def test_tokens_an_event_do_not_bend_the_rate(events: int, per_event: int) -> None:
    """k tokens every k/100 s are 100 tok/s, however they are packed."""
    trial = measure(stream(events, events * per_event, gap=per_event / 100))
    assert trial.decode_tok_s == pytest.approx(100.0)


def test_an_answer_that_comes_at_once_was_not_streamed() -> None:
    with pytest.raises(MeasurementError, match="at once"):
        measure(stream(events=5, tokens=5, gap=0.0))


def test_a_stream_whose_beginning_was_held_back_shows_no_rate() -> None:
    late = [Chunk(0.482 + 1e-6 * n, "10\n") for n in range(40)]
    rest = [Chunk(0.49 + 0.005 * n, "10\n", finish_reason="stop" if n == 59 else None) for n in range(60)]
    with pytest.raises(trial.HeldBackError, match="40 of 100 events came in"):
        measure([*late, *rest, Chunk(0.8, usage=Usage(7, 100))])
    few = [Chunk(0.482 + 1e-6 * n, "10\n") for n in range(10)]
    assert measure([*few, *rest, Chunk(0.8, usage=Usage(7, 70))]).events == 70


def test_a_burst_is_accepted_where_many_streams_are_read_at_once() -> None:
    late = [Chunk(0.482 + 1e-6 * n, "10\n") for n in range(40)]
    rest = [Chunk(0.49 + 0.005 * n, "10\n", finish_reason="stop" if n == 59 else None) for n in range(60)]
    assert measure([*late, *rest, Chunk(0.8, usage=Usage(7, 100))], bursts=True).events == 100


def test_tokens_without_text_are_counted_where_the_server_sent_events_for_them() -> None:
    """Special tokens have no text; vLLM sends an empty event for each."""
    chunks = [Chunk(0.1 + 0.01 * n, "a" if n < 5 else "") for n in range(30)]
    ended = Chunk(0.5, finish_reason="length")
    assert measure([*chunks, ended, Chunk(0.5, usage=Usage(7, 30))]).completion_tokens == 30
    with pytest.raises(MeasurementError, match="usage claims 300"):
        measure([*chunks, ended, Chunk(0.5, usage=Usage(7, 300))])


def test_ends_that_a_parser_held_back_count_where_so_many_tokens_were_asked_for() -> None:
    chunks = [Chunk(0.1 + 0.01 * n, "a") for n in range(5)]
    stream = [*chunks, Chunk(2.5, finish_reason="length"), Chunk(2.5, usage=Usage(7, 128))]
    assert measure(stream, at_most=128).completion_tokens == 128
    with pytest.raises(MeasurementError, match="usage claims 128"):
        measure(stream, at_most=100)


def test_gaps_are_the_times_between_events_with_text() -> None:
    chunks = [Chunk(0.1), Chunk(0.5, "a"), Chunk(0.6, "b"), Chunk(0.65), Chunk(0.9, finish_reason="stop")]
    assert trial.gaps([*chunks, Chunk(1.5, usage=Usage(7, 3))]) == pytest.approx([0.1, 0.3])


def noisy(chosen: random.Random, rate: float, stalls: int = 0, slow: float = 1.0) -> list[Chunk]:
    """A stream of 100 tokens whose times vary by 10 %, with stalls of 200 ms."""
    stalled = chosen.sample(range(1, 100), stalls)
    at, chunks = 0.1, []
    for n in range(100):
        at += chosen.gauss(1, 0.1) / rate * slow + (0.2 if n in stalled else 0)
        chunks.append(Chunk(at, "10\n", finish_reason="stop" if n == 99 else None))
    return [*chunks, Chunk(at, usage=Usage(7, 100))]


def test_single_stalls_do_not_move_the_steady_rate() -> None:
    chosen = random.Random(1)
    streams = [noisy(chosen, 57, stalls=n % 5 == 0) for n in range(20)]
    assert trial.steady_rate(streams).mean == pytest.approx(57, rel=0.01)
    assert statistics.fmean(measure(chunks).decode_tok_s for chunks in streams) < 56


def test_single_slow_trials_do_not_move_the_steady_rate() -> None:
    chosen = random.Random(2)
    streams = [noisy(chosen, 57, slow=1.3 if n % 10 == 0 else 1) for n in range(20)]
    assert trial.steady_rate(streams).mean == pytest.approx(57, rel=0.01)


def test_an_event_that_is_delivered_late_does_not_move_the_steady_rate() -> None:
    """Its gap is long, the next one short: nothing was decoded more slowly."""
    even = stream(events=100, tokens=100)
    late = [replace(chunk, at=chunk.at + 0.009) if n % 9 == 4 else chunk for n, chunk in enumerate(even)]
    assert trial.steady_rate([late] * 4).mean == pytest.approx(100, rel=0.002)


def test_what_hits_most_trials_moves_the_steady_rate() -> None:
    chosen = random.Random(3)
    assert trial.steady_rate([noisy(chosen, 57, stalls=1) for _ in range(20)]).mean < 55.5
    assert trial.steady_rate([noisy(chosen, 57, slow=1.05) for _ in range(20)]).mean == pytest.approx(54.3, rel=0.01)


@pytest.mark.parametrize("per_event", [1, 3])
def test_the_steady_rate_of_even_streams_is_their_rate(per_event: int) -> None:
    streams = [stream(60, 60 * per_event, gap=per_event / 100) for _ in range(4)]
    found = trial.steady_rate(streams)
    assert found.mean == pytest.approx(100)
    assert found.stderr == pytest.approx(0, abs=1e-9)


def test_the_standard_error_is_that_of_many_starts() -> None:
    chosen = random.Random(4)
    found = [trial.steady_rate([noisy(chosen, 57, stalls=n % 10 == 0) for n in range(16)]) for _ in range(60)]
    spread = statistics.stdev(one.mean for one in found)
    told = statistics.fmean(one.stderr for one in found if one.stderr is not None)
    assert told == pytest.approx(spread, rel=0.35)


def test_one_piece_shows_no_spread_and_two_events_are_enough() -> None:
    assert trial.steady_rate([stream(2, 2)]).stderr is None
    assert trial.steady_rate([stream(2, 2), stream(2, 2)]).mean == pytest.approx(100)
