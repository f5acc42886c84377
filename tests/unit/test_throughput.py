"""The throughput gate: what the server does is measured, and no verdict is better than what it rests on."""

from __future__ import annotations

import json
import statistics
import threading
from typing import Any

import pytest
from fake_openai_server import COUNT, Body, FakeOpenAiServer, Reply
from octoserve import baseline, load, sweep, sweep_plan, throughput
from octoserve.baseline import Start
from octoserve.openai_api import Client
from octoserve.throughput import Limits, Measured, Request, gate
from octoserve.trial import Trial

NO_BASELINE: dict[str, Any] = baseline.compare([], "now", 1.0)
RATE_BOUND = 0.02  # share of the rate by which measured and true may differ
FEW = Request(trials=1, warmup=0)
SMALL = sweep_plan.parse(
    {
        "point_seconds": 5,
        "answer_tokens": 12,
        "requests": 1,
        "concurrency": [1, 3],
        "context": [0, 400, 9000],
        "mix": {"concurrency": 2, "requests": 4, "prompt_tokens": [16, 90], "answer_tokens": [8, 12]},
    }
)


def run(reply: Reply, limits: Limits, request: Request = FEW, **more: Any) -> dict[str, Any]:
    with FakeOpenAiServer(reply) as server:
        return gate(Client(server.url), request, limits, lambda mean: NO_BASELINE, **more)


def script(body: Body) -> Reply:
    """The counting prompt counts; every other one gets as many words as it may, one token each."""
    text = body["messages"][0]["content"]
    if text == throughput.COUNTING_PROMPT:
        return Reply(COUNT, token_s=0.002)
    return Reply(" w" * (body["max_tokens"] - 1), token_s=0.002, prompt_tokens=9 + len(text.split()))


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 5])
def test_the_measured_rate_is_the_servers(tokens_per_chunk: int) -> None:
    """Held to the server's own clock, in the best of three trials: a busy machine may disturb one."""
    reply = Reply(COUNT, ttft_s=0.1, token_s=0.004, tokens_per_chunk=tokens_per_chunk, comments=True, usage_delay_s=0.2)
    with FakeOpenAiServer(reply) as server:
        found = gate(Client(server.url), Request(trials=3, warmup=0), Limits(1, 100), lambda mean: NO_BASELINE)
    assert found["verdict"] == "pass"
    rates, waits = [], []
    for trial, (received, first, *_, last) in zip(found["trials"], server.sent):
        rate = (100 - tokens_per_chunk) / (last - first)
        rates.append(abs(trial["decode_tok_s"] / rate - 1))
        waits.append(abs(trial["ttft_s"] - (first - received)))
        assert trial["end_to_end_tok_s"] == pytest.approx(100 / trial["total_s"])
        assert trial["total_s"] > last - received + 0.19, "late usage is part of the whole time"
    # The end token comes alone, so a packed stream starts with more tokens than its average event.
    assert min(rates) < RATE_BOUND + (tokens_per_chunk - 1) / 100
    assert min(waits) < 0.01
    assert found["itl_ms"]["n"] == sum(trial["events"] - 1 for trial in found["trials"])
    assert found["itl_ms"]["p50"] == pytest.approx(4 * tokens_per_chunk, abs=1)


@pytest.mark.parametrize("first_chunk", [True, False])
def test_an_empty_first_chunk_is_no_token(first_chunk: bool) -> None:
    found = run(Reply(COUNT, ttft_s=0.2, token_s=0.002, empty_first_chunk=first_chunk), Limits(1, 100))
    assert found["trials"][0]["events"] == 100
    assert found["ttft_ms"] >= 200


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(COUNT, send_usage=False), "holds no usage"),
        (Reply(COUNT, completion_tokens=50), "claims 50 completion tokens"),
        (Reply(COUNT, completion_tokens=400), "claims 400 completion tokens"),
        (Reply(COUNT, die_after=50), "broken"),
        (Reply(COUNT, error_after=50), "engine died"),
        (Reply(status=429, headers={"Retry-After": "0"}), "HTTP 429"),
        (Reply(status=500), "HTTP 500"),
        (Reply(""), "1 events"),
    ],
)
def test_what_cannot_be_measured_is_no_pass(reply: Reply, reason: str) -> None:
    found = run(reply, Limits(0.001))
    assert (found["ok"], found["verdict"]) == (False, "could-not-run")
    assert reason.lower() in found["reason"].lower()
    assert found["decode_tok_s"] is None


@pytest.mark.parametrize(("held_back", "verdict"), [(2, "pass"), (4, "could-not-run")])
def test_a_stream_that_was_held_back_is_asked_again_a_few_times(held_back: int, verdict: str) -> None:
    fair = Reply(COUNT, ttft_s=0.01)
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": token}}]} for token in fair.tokens]
    events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": fair.usage}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    burst = Reply(raw_body=body.encode())
    replies = iter([burst] * held_back + [fair] * 10)
    with FakeOpenAiServer(lambda _body: next(replies)) as server:
        found = gate(Client(server.url), Request(trials=3, warmup=0), Limits(1), lambda mean: NO_BASELINE)
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


def test_warm_up_is_kept_and_not_judged() -> None:
    """The first request of a server is slow; it shows, and neither mean nor verdict knows it."""
    cold = iter([Reply("1 2 3 4", token_s=0.05)])
    warm = Reply("1 2 3 4", token_s=0.005)
    with FakeOpenAiServer(lambda _body: next(cold, warm)) as server:
        client, request = Client(server.url), Request(trials=3, warmup=2, max_tokens=9)
        found = gate(client, request, Limits(100), lambda mean: NO_BASELINE)
    assert len(server.requests) == 5
    assert found["verdict"] == "pass"
    assert found["decode_tok_s"]["n"] == len(found["trials"]) == 3
    assert [len(found["warmup"]), found["warmup"][0]["decode_tok_s"] < 25] == [2, True]
    assert server.requests[0]["messages"][0]["content"] == throughput.COUNTING_PROMPT
    assert (server.requests[0]["max_tokens"], server.requests[0]["temperature"]) == (9, 0.0)


def test_mix_and_sweeps_are_measured_and_progress_is_told() -> None:
    told: list[tuple[Any, ...]] = []
    with FakeOpenAiServer(script, max_model_len=4096) as server:
        client, request = Client(server.url), Request(trials=2, warmup=0, options={"top_k": 1})
        found = gate(
            client,
            request,
            Limits(1, 100),
            lambda mean: NO_BASELINE,
            settings=SMALL,
            max_num_seqs=2,
            report=lambda *step: told.append(step),
        )
    assert found["verdict"] == "pass", found["reason"]
    assert told[:2] == [("counting", 1, 2, "trials"), ("counting", 2, 2, "trials")]
    assert told[2:] == [
        (name, n, 6, "points")
        for n, name in enumerate(
            ["mix", "concurrency 1", "concurrency 3", "context short", "context 400", "context 9000"]
        )
    ]
    assert {body["top_k"] for body in server.requests} == {1}
    points = {throughput.point_name(point): point for point in found["points"]}
    assert points["context 400"]["prompt_tokens"] == pytest.approx(400, rel=0.02)
    assert "at most 2 requests at once" in points["concurrency 3"]["reason"]
    assert "the server takes 4096" in points["context 9000"]["reason"]
    assert all(point["output_tok_s"] or point["reason"] for point in found["points"])
    assert found["generator"]["ceiling_events_s"] > 100
    json.dumps(found)
    text = throughput.describe(found)
    assert "  context 9000: left out: " in text
    assert "  mix: " in text


def test_a_point_with_a_failed_request_is_never_a_silent_pass() -> None:
    """The server breaks down under three requests at once; one at a time it does well."""

    def breaks(body: Body) -> Reply:
        return Reply(status=500) if body["max_tokens"] == 12 and len(server.requests) > 10 else script(body)

    with FakeOpenAiServer(breaks) as server:
        found = gate(Client(server.url), FEW, Limits(1, 100), lambda mean: NO_BASELINE, settings=SMALL)
    assert (found["ok"], found["verdict"]) == (False, "could-not-run")
    assert "requests failed, the first with: " in found["reason"]
    assert "HTTP 500" in found["reason"]
    assert found["decode_tok_s"]["n"] == 1, "what was measured stays"


def test_an_engine_that_hangs_under_load_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time is answered; the first of several hangs the server."""
    monkeypatch.setattr(sweep, "PROBE_TIMEOUT_S", 0.2)
    settings = {"point_seconds": 1, "requests": 1, "answer_tokens": 12, "concurrency": [1, 3], "context": []}
    ended = threading.Event()

    def hangs(body: Body) -> Reply:
        if sum(asked["max_tokens"] == 12 for asked in server.requests) > 1:
            ended.wait(20)
        return script(body)

    with FakeOpenAiServer(hangs) as server:
        plan = sweep_plan.parse({**settings, "mix": {"requests": 0}})
        found = gate(Client(server.url), FEW, Limits(1, 100), lambda mean: NO_BASELINE, settings=plan)
        ended.set()
    assert (found["ok"], found["verdict"]) == (False, "could-not-run")
    assert found["reason"].startswith("concurrency 3: 3 of 3 requests failed, the first with: 3 of 3 requests were cut")
    assert "a new request then got no token within 0.2 s" in found["reason"]


def test_sweeps_that_cannot_be_measured_leave_the_trials_and_the_floor() -> None:
    def breaks(body: Body) -> Reply:
        return script(body) if body["messages"][0]["content"] == throughput.COUNTING_PROMPT else Reply(status=500)

    with FakeOpenAiServer(breaks) as server:
        client = Client(server.url)
        found = gate(client, FEW, Limits(1, 100), lambda mean: NO_BASELINE, settings=SMALL)
        slow = gate(client, FEW, Limits(10**6, 100), lambda mean: NO_BASELINE, settings=SMALL)
    assert (found["verdict"], found["decode_tok_s"]["n"]) == ("could-not-run", 1)
    assert "the sweeps could not be measured: " in found["reason"]
    assert (slow["ok"], slow["verdict"]) == (False, "fail")


def test_a_history_that_is_too_wide_is_said_to_see_nothing() -> None:
    found = run(Reply("1 2 3 4", token_s=0.005), Limits(0.001), Request(trials=3, warmup=0))
    wide = {**found, "baseline": baseline.compare(starts(20.0, 150.0, 90.0), "now", 57.0)}
    assert "which differ so much that no slowdown would raise an alarm" in throughput.describe(wide)


@pytest.mark.parametrize(("tokens_per_chunk", "measured"), [(10, True), (25, False), (50, False), (100, False)])
def test_a_stream_in_large_pieces_shows_no_rate(tokens_per_chunk: int, measured: bool) -> None:
    found = run(Reply(COUNT, token_s=0.003, tokens_per_chunk=tokens_per_chunk), Limits(1, 100))
    assert (found["verdict"] == "pass") is measured, found["reason"]


def test_more_tokens_than_were_asked_for_are_no_measurement() -> None:
    found = run(
        Reply(COUNT, token_s=0.002, completion_tokens=140), Limits(1), Request(trials=1, warmup=0, max_tokens=120)
    )
    assert "usage claims 140 completion tokens, 120 were asked for at most" in found["reason"]


def starts(*means: float) -> list[Start]:
    return [Start(f"s{n}", "2026-01-01T00:00:00+00:00", f"{n:04}", mean, 5) for n, mean in enumerate(means)]


def verdict(mean: float, fail_on_regression: bool, cost: load.Cost | None = None) -> dict[str, Any]:
    trial = Trial(100, 100, 0.1, 2.0, mean, 50.0)
    found = baseline.compare(starts(57.0, 57.2, 56.8), "now", mean)
    measured = Measured(trials=[trial], trials_cost=cost or load.total([]))
    return throughput.judge(measured, Limits(50.0, fail_on_regression=fail_on_regression), found)


def test_a_regression_warns_or_fails_and_the_floor_always_fails() -> None:
    assert verdict(57.0, True) == {"ok": True, "verdict": "pass", "reason": ""}
    for fails in (False, True):
        found = verdict(52.0, fails)
        assert (found["ok"], found["verdict"]) == (not fails, "regression")
        assert "8.8% slower than the mean 57.00 tok/s of 3 earlier starts" in found["reason"]
        assert verdict(49.0, fails)["ok"] is False


def test_no_regression_is_claimed_where_the_generator_was_the_bottleneck() -> None:
    busy = load.Cost(seconds=20, cpu_s=18, events=2000, starved=0.0)
    found = verdict(52.0, False, busy)
    assert (found["ok"], found["verdict"]) == (False, "could-not-run")
    assert "the load generator was the bottleneck (busy 90% of a core" in found["reason"]
    assert verdict(57.0, False, busy)["verdict"] == "pass", "a bottleneck makes nothing faster"
    below = verdict(49.0, False, busy)
    assert (below["ok"], below["verdict"]) == (False, "could-not-run")
    assert "the floor of the profile is 50; but the load generator was the bottleneck" in below["reason"]


def test_description_names_numbers_and_alarm() -> None:
    found = run(Reply("1 2 3 4", token_s=0.005), Limits(0.001), Request(trials=3, warmup=0))
    text = throughput.describe(found)
    assert f"{statistics.fmean(t['decode_tok_s'] for t in found['trials']):.2f} tok/s" in text
    assert "0 earlier starts: only the floor counts" in text
    later = {**found, "baseline": baseline.compare(starts(57.0, 57.2, 56.8), "now", 57.0)}
    assert "alarm from 2.8% slower, caught with 95 % from 4.7%" in throughput.describe(later)
    json.dumps(found)
    assert "could-not-run: HTTP" in throughput.describe(throughput.could_not_run("HTTP 500"))


def test_what_could_not_run_has_the_keys_of_what_did() -> None:
    found = run(Reply("1 2 3 4", token_s=0.005), Limits(0.001))
    assert set(throughput.could_not_run("x")) == {*found, "gpus"}
