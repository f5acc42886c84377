"""The throughput gate: it measures what the server does, believes no count unchecked, and alarms as stated."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from fake_openai_server import COUNT, FakeOpenAiServer, Reply
from hypothesis import given
from hypothesis import strategies as st
from octoserve import baseline, student_t, throughput
from octoserve.baseline import Start
from octoserve.openai_api import Chunk, Client, Usage
from octoserve.throughput import Limits, MeasurementError, gate, measure

NO_BASELINE: dict[str, Any] = baseline.compare([], "now", 1.0)
RATE_BOUND = 0.02  # share of the rate by which measured and true may differ


def stream(events: int, tokens: int, ttft: float = 0.2, gap: float = 0.01) -> list[Chunk]:
    """A stream of text events and a usage event: the last text event carries the finish reason."""
    last = events - 1
    chunks = [Chunk(ttft + gap * n, "10\n", finish_reason="stop" if n == last else None) for n in range(events)]
    return [Chunk(0.1), *chunks, Chunk(chunks[-1].at, usage=Usage(7, tokens))]


def run(reply: Reply, limits: Limits, trials: int = 1, **options: Any) -> dict[str, Any]:
    with FakeOpenAiServer(reply) as server:
        return gate(Client(server.url), limits, lambda mean: NO_BASELINE, trials=trials, warmup=0, **options)


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


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 5])
def test_the_measured_rate_is_the_servers(tokens_per_chunk: int) -> None:
    """Held to the server's own clock, in the best of three trials: a busy machine may disturb one."""
    reply = Reply(COUNT, ttft_s=0.1, token_s=0.004, tokens_per_chunk=tokens_per_chunk, comments=True)
    with FakeOpenAiServer(reply) as server:
        found = gate(Client(server.url), Limits(1, 100), lambda mean: NO_BASELINE, trials=3, warmup=0)
    assert found["verdict"] == "pass"
    rates, waits = [], []
    for trial, (received, first, *_, last) in zip(found["trials"], server.sent):
        rate = (100 - tokens_per_chunk) / (last - first)
        rates.append(abs(trial["decode_tok_s"] / rate - 1))
        waits.append(abs(trial["ttft_s"] - (first - received)))
        assert trial["end_to_end_tok_s"] == pytest.approx(100 / trial["total_s"])
    # The end token comes alone, so a packed stream starts with more tokens than its average event.
    assert min(rates) < RATE_BOUND + (tokens_per_chunk - 1) / 100
    assert min(waits) < 0.01


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(COUNT, send_usage=False), "holds no usage"),
        (Reply(COUNT, completion_tokens=50), "claims 50 completion tokens"),
        (Reply(COUNT, completion_tokens=400), "claims 400 completion tokens"),
        (Reply(COUNT, die_after=50), "broken"),
        (Reply(COUNT, error_after=50), "engine died"),
        (Reply(status=429), "HTTP 429"),
        (Reply(status=500), "HTTP 500"),
        (Reply(""), "1 events"),
    ],
)
def test_what_cannot_be_measured_is_no_pass(reply: Reply, reason: str) -> None:
    found = run(reply, Limits(0.001))
    assert (found["ok"], found["verdict"]) == (False, "could-not-run")
    assert reason.lower() in found["reason"].lower()
    assert found["decode_tok_s"] is None


def test_an_answer_that_comes_at_once_was_not_streamed() -> None:
    with pytest.raises(MeasurementError, match="at once"):
        measure(stream(events=5, tokens=5, gap=0.0))


def test_a_stream_whose_beginning_was_held_back_shows_no_rate() -> None:
    late = [Chunk(0.482 + 1e-6 * n, "10\n") for n in range(40)]
    rest = [Chunk(0.49 + 0.005 * n, "10\n", finish_reason="stop" if n == 59 else None) for n in range(60)]
    with pytest.raises(throughput.HeldBackError, match="40 of 100 events came in"):
        measure([*late, *rest, Chunk(0.8, usage=Usage(7, 100))])
    few = [Chunk(0.482 + 1e-6 * n, "10\n") for n in range(10)]
    assert measure([*few, *rest, Chunk(0.8, usage=Usage(7, 70))]).events == 70


@pytest.mark.parametrize(("held_back", "verdict"), [(2, "pass"), (4, "could-not-run")])
def test_a_stream_that_was_held_back_is_asked_again_a_few_times(held_back: int, verdict: str) -> None:
    fair = Reply(COUNT, ttft_s=0.01)
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": token}}]} for token in fair.tokens]
    events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": fair.usage}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    burst = Reply(raw_body=body.encode())
    replies = iter([burst] * held_back + [fair] * 10)
    with FakeOpenAiServer(lambda _body: next(replies)) as server:
        found = gate(Client(server.url), Limits(1), lambda mean: NO_BASELINE, trials=3, warmup=0)
    assert found["verdict"] == verdict, found["reason"]
    assert ("held back" in found["reason"]) == (verdict == "could-not-run")


def test_a_usage_that_fits_the_stream_but_not_the_profile_fails() -> None:
    found = run(Reply(COUNT, completion_tokens=110), Limits(0.001, expected_tokens=100))
    assert (found["ok"], found["verdict"]) == (False, "fail")
    assert found["reason"] == "answers of 110 tokens, wanted exactly 100"


def test_below_the_floor_fails() -> None:
    found = run(Reply("1 2 3 4 5 6 7 8", token_s=0.01), Limits(floor_tok_s=200))
    assert (found["ok"], found["verdict"]) == (False, "fail")
    assert "the floor of the profile is 200" in found["reason"]


def test_warm_up_is_asked_and_not_measured() -> None:
    with FakeOpenAiServer(Reply("1 2 3", token_s=0.001)) as server:
        client = Client(server.url)
        found = gate(client, Limits(0.001), lambda mean: NO_BASELINE, trials=3, warmup=2, max_tokens=9)
    assert len(server.requests) == 5
    assert found["decode_tok_s"]["n"] == len(found["trials"]) == 3
    assert server.requests[0]["messages"][0]["content"] == throughput.COUNTING_PROMPT
    assert (server.requests[0]["max_tokens"], server.requests[0]["temperature"]) == (9, 0.0)


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.975, 100, 1.984),
        (0.99, 2, 6.965),
        (0.99, 3, 4.541),
        (0.95, 7, 1.895),
    ],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: int, table: float) -> None:
    assert student_t.quantile(probability, freedom) == pytest.approx(table, abs=6e-4)


def test_summary_of_a_sample() -> None:
    found = student_t.summarize([10.0, 12.0, 14.0])
    assert (found["mean"], found["stdev"], found["n"]) == (12.0, 2.0, 3)
    assert found["ci95"] == pytest.approx([12 - 4.303 * 2 / 3**0.5, 12 + 4.303 * 2 / 3**0.5], abs=1e-2)
    assert student_t.summarize([10.0]) == {"mean": 10.0, "stdev": None, "ci95": None, "n": 1}


def starts(*means: float) -> list[Start]:
    return [Start(f"s{n}", "2026-01-01T00:00:00+00:00", f"{n:04}", mean, 5) for n, mean in enumerate(means)]


def test_before_three_starts_only_the_floor_counts() -> None:
    for history in (starts(), starts(57.0), starts(57.0, 57.1)):
        found = baseline.compare(history, "now", 30.0)
        assert not found["regression"]
        assert found["alarm_below"] is None
        assert found["starts"] == len(history)


def test_after_three_starts_a_slowdown_is_seen_and_its_smallest_size_told() -> None:
    history = starts(57.0, 57.2, 56.8, 57.1)
    healthy, slow = (baseline.compare(history, "now", mean) for mean in (56.9, 54.9))
    assert not healthy["regression"]
    assert slow["regression"]
    edge = healthy["mean"] * (1 - healthy["smallest_slowdown"])
    assert edge == pytest.approx(healthy["alarm_below"])
    assert baseline.compare(history, "now", edge - 1e-6)["regression"]
    assert not baseline.compare(history, "now", edge + 1e-6)["regression"]


def test_the_alarm_is_where_the_formula_puts_it() -> None:
    found = baseline.compare(starts(57.0, 57.2, 56.8), "now", 57.0)
    assert found["alarm_below"] == pytest.approx(57.0 - 6.9646 * 0.2 * (4 / 3) ** 0.5, abs=1e-4)


def test_a_start_is_not_compared_with_itself() -> None:
    assert baseline.compare(starts(57.0, 57.0, 57.0), "s1", 57.0)["starts"] == 2


def test_false_alarms_keep_their_stated_rate() -> None:
    chosen = random.Random(20261130)
    runs = 4000
    alarms = 0
    for _ in range(runs):
        history = starts(*(chosen.gauss(57, 0.57) for _ in range(5)))
        alarms += baseline.compare(history, "now", chosen.gauss(57, 0.57))["regression"]
    # 0.01 with a binomial spread of four standard deviations
    assert alarms / runs == pytest.approx(baseline.ALPHA, abs=4 * (0.01 * 0.99 / runs) ** 0.5)


def verdict(mean: float, fail_on_regression: bool) -> dict[str, Any]:
    trial = throughput.Trial(100, 100, 0.1, 2.0, mean, 50.0)
    found = baseline.compare(starts(57.0, 57.2, 56.8), "now", mean)
    return throughput.judge([trial], Limits(50.0), found, fail_on_regression)


def test_a_regression_warns_or_fails_and_the_floor_always_fails() -> None:
    assert verdict(57.0, True) == {"ok": True, "verdict": "pass", "reason": ""}
    for fails in (False, True):
        found = verdict(52.0, fails)
        assert (found["ok"], found["verdict"]) == (not fails, "regression")
        assert "8.8% slower than the mean 57.00 of 3 earlier starts" in found["reason"]
        assert verdict(49.0, fails)["ok"] is False


def test_history_grows_by_one_mean_a_start(tmp_path: Path) -> None:
    path = tmp_path / "baselines" / "tiny__vllm.json"
    for start in starts(50.0, 52.0):
        baseline.append(path, start)
    assert [start.mean for start in baseline.load(path)] == [50.0, 52.0]
    again = baseline.append(path, Start("s1", "2026-01-02T00:00:00+00:00", "0001", 56.0, 15))
    assert [start.mean for start in again] == [50.0, 55.0]
    assert again == baseline.load(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"starts": [{"mean": 1}]}', '{"starts": 3}'])
def test_a_damaged_history_is_an_error_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="move the file away"):
        baseline.append(path, starts(1.0)[0])
    assert path.read_text() == text


def test_a_failed_write_leaves_the_old_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.json"
    baseline.append(path, starts(50.0)[0])

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        baseline.append(path, starts(1.0, 2.0)[1])
    assert [start.mean for start in baseline.load(path)] == [50.0]
    assert len(list(tmp_path.iterdir())) == 1


def test_description_names_numbers_and_alarm() -> None:
    found = run(Reply("1 2 3 4", token_s=0.005), Limits(0.001), trials=3)
    text = throughput.describe(found)
    assert f"{statistics.fmean(t['decode_tok_s'] for t in found['trials']):.2f} tok/s" in text
    assert "0 earlier starts: only the floor counts" in text
    json.dumps(found)
    assert "could-not-run: HTTP" in throughput.describe(throughput.could_not_run("HTTP 500"))
