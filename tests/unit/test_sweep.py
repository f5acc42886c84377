"""Points beside the counting prompt: as planned, within their bounds, with prompts of the length asked for."""

from __future__ import annotations

import itertools
import json
import random
import threading
from typing import Any

import pytest
from fake_openai_server import Body, FakeOpenAiServer, Reply
from octoserve import latency, prompts, sweep, sweep_plan
from octoserve.openai_api import Client
from octoserve.prompts import Sizing, Writer
from octoserve.sweep_plan import CONCURRENCY, CONTEXT, MIX, Mix, Point, Served, Settings

TEMPLATE, PER_WORD = 11, 3  # how the server below counts


def tokens_of(text: str) -> int:
    return TEMPLATE + PER_WORD * len(text.split())


def script(body: Body) -> Reply:
    """Answers as long as asked for, with what the prompt takes in `usage`."""
    wanted = body["max_tokens"]
    prompt = tokens_of(body["messages"][0]["content"])
    return Reply(" w" * (wanted - 1), token_s=0.005, ttft_s=0.02, prompt_tokens=prompt)


def measure(server: FakeOpenAiServer, point: Point, seconds: float = 10.0) -> dict[str, Any]:
    client, writer = Client(server.url), Writer(1)
    found, _ = sweep.run(
        client, point, seconds, writer=writer, sizing=Sizing(TEMPLATE + PER_WORD, PER_WORD), options={}
    )
    json.dumps(found)
    return found


def test_the_default_plan_is_a_mix_and_two_sweeps() -> None:
    points = sweep_plan.plan(Settings())
    assert [(point.sweep, point.concurrency, point.context_tokens) for point in points] == [
        (MIX, 4, 0),
        *[(CONCURRENCY, streams, 0) for streams in (1, 4, 16, 32)],
        *[(CONTEXT, 1, tokens) for tokens in (0, 8192, 32768)],
    ]
    assert len(points[3].sizes) == 16 * 3
    assert points[-1].sizes == [(32768, 128)] * 3


def test_the_mix_is_varied_and_the_same_each_time() -> None:
    mix = Mix(requests=200, prompt_tokens=(16, 2048), answer_tokens=(8, 64))
    first, second = (sweep_plan.plan(Settings(mix=mix))[0].sizes for _ in range(2))
    assert first == second
    prompt, answer = zip(*first)
    assert 16 <= min(prompt) < 32
    assert 1024 < max(prompt) <= 2048
    assert 8 <= min(answer) < 12
    assert 48 < max(answer) <= 64


@pytest.mark.parametrize(
    ("point", "served", "reason"),
    [
        (Point(CONCURRENCY, 32, 0, [(32, 128)]), Served(4096, 16), "at most 16 requests at once (max-num-seqs)"),
        (Point(CONTEXT, 1, 8192, [(8192, 128)]), Served(8192, 16), "up to 8730 tokens, the server takes 8192"),
        (Point(CONTEXT, 1, 8192, [(8192, 128)]), Served(16384, 16), ""),
        (Point(CONTEXT, 1, 8192, [(8192, 128)]), Served(None, None), ""),
        (Point(MIX, 4, 0, [(16, 16), (900, 200)]), Served(1024, 8), "up to 1145 tokens, the server takes 1024"),
    ],
)
def test_what_the_server_does_not_take_is_left_out_with_the_reason(point: Point, served: Served, reason: str) -> None:
    found = sweep_plan.obstacle(point, served)
    assert reason in found
    assert bool(reason) == bool(found)
    left_out = sweep.left_out(point, found)
    assert (left_out["requests"], left_out["failed"], left_out["output_tok_s"], left_out["ttft_ms"]) == (
        0,
        0,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({"contexts": [1]}, "unknown key sweeps.contexts"),
        ({"concurrency": 4}, "sweeps.concurrency is 4, wanted a list"),
        ({"concurrency": [0]}, r"sweeps.concurrency is \[0\]"),
        ({"context": [-1]}, r"sweeps.context is \[-1\]"),
        ({"point_seconds": 0}, "sweeps.point_seconds is 0"),
        ({"requests": True}, "sweeps.requests is True"),
        ({"mix": 3}, "sweeps.mix is 3, wanted a mapping"),
        ({"mix": {"prompt_tokens": [9, 3]}}, r"sweeps.mix.prompt_tokens is \[9, 3\], wanted two whole numbers"),
        ({"mix": {"size": 3}}, "unknown key sweeps.mix.size"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ValueError, match=mistake):
        sweep_plan.parse(given)


def test_what_a_profile_leaves_out_has_its_default() -> None:
    found = sweep_plan.parse({"context": [0], "mix": {"requests": 0}})
    assert (found.context, found.concurrency, found.mix.concurrency) == ([0], (1, 4, 16, 32), 4)
    assert MIX not in [point.sweep for point in sweep_plan.plan(found)]


def test_prompts_have_about_the_tokens_asked_for() -> None:
    sizing = prompts.size(Writer(1), tokens_of)
    for wanted in (64, 500, 8192):
        assert tokens_of(Writer(2).text(sizing.words(wanted))) == pytest.approx(wanted, rel=0.05)
    assert sizing.words(1) == 1


def test_no_two_prompts_begin_alike_so_that_no_prefix_cache_helps() -> None:
    one, other = Writer(1), Writer(1)
    texts = [writer.text(20) for writer in (one, one, other, other)]
    assert len({text.split()[0] for text in texts}) == 4
    assert texts[0].split()[1:] == texts[2].split()[1:]


def test_a_point_is_measured() -> None:
    with FakeOpenAiServer(script) as server:
        found = measure(server, Point(CONTEXT, 2, 600, [(600, 40)] * 6))
    assert [body["ignore_eos"] for body in server.requests] == [True] * 6
    assert found["prompt_tokens"] == pytest.approx(600, rel=0.02)
    assert (found["requests"], found["failed"], found["cut"], found["reason"]) == (6, 0, 0, "")
    assert found["decode_tok_s"] == pytest.approx(200, rel=0.1)
    assert 20 <= found["ttft_ms"]["p50"] < 60
    assert found["itl_ms"]["p50"] == pytest.approx(5, abs=1)
    # Two streams of 40 tokens in 215 ms and what opening a connection takes.
    assert 0.7 * 372 < found["output_tok_s"] < 372
    assert found["end_to_end_tok_s"] < 186


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Reply(status=500), "HTTP 500"),
        (Reply(" w" * 20, die_after=5), "broken"),
        (Reply(" w" * 20, send_usage=False), "holds no usage"),
        (Reply(" w" * 20, completion_tokens=500), "usage claims 500"),
    ],
)
def test_a_request_that_fails_is_counted_and_shown(broken: Reply, reason: str) -> None:
    numbers = itertools.count()
    with FakeOpenAiServer(lambda body: broken if next(numbers) == 2 else script(body)) as server:
        found = measure(server, Point(MIX, 1, 0, [(50, 20)] * 4))
    assert (found["requests"], found["failed"]) == (4, 1)
    assert "1 of 4 requests failed, the first with: " in found["reason"]
    assert reason in found["reason"]
    assert found["output_tok_s"] is not None


def test_a_context_that_the_server_cut_is_no_point() -> None:
    with FakeOpenAiServer(script) as server:
        found = measure(server, Point(CONTEXT, 1, 4000, [(600, 40)] * 2))
    assert (found["failed"], found["output_tok_s"]) == (2, None)
    assert "tokens came, wanted 4000" in found["reason"]


def test_a_point_is_cut_at_its_time_and_says_so() -> None:
    slow = Reply(" w" * 50, token_s=0.01)
    with FakeOpenAiServer(slow) as server:
        found = measure(server, Point(CONCURRENCY, 1, 0, [(50, 51)] * 20), seconds=0.8)
    assert found["seconds"] < 2
    assert (found["failed"], found["cut"]) == (0, 1)
    assert server.requests[-1]["max_tokens"] == 1, "it was asked whether it only was slow"
    assert "cut short at 0.8 s with 1 of 20 requests finished" in found["reason"]
    with FakeOpenAiServer(slow) as server:
        found = measure(server, Point(CONCURRENCY, 1, 0, [(50, 50)] * 20), seconds=0.2)
    assert found["output_tok_s"] is None
    assert "with 0 of 20 requests finished" in found["reason"]


def test_an_engine_that_hangs_under_load_failed_and_was_not_only_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third request on no one gets a token."""
    monkeypatch.setattr(sweep, "PROBE_TIMEOUT_S", 0.3)
    asked, ended = itertools.count(), threading.Event()

    def hangs(body: Body) -> Reply:
        if next(asked) >= 2:
            ended.wait(20)
        return script(body)

    with FakeOpenAiServer(hangs) as server:
        found = measure(server, Point(CONCURRENCY, 2, 0, [(50, 20)] * 4), seconds=1)
        ended.set()
    assert (found["requests"], found["failed"], found["cut"]) == (4, 2, 0)
    assert "2 of 4 requests were cut at 1 s, and a new request then got no token within 0.3 s: http" in found["reason"]
    assert found["output_tok_s"] is not None, "what was measured before stays"


def test_percentiles_are_linear_between_neighbours() -> None:
    assert latency.percentile([1.0], 0.99) == 1.0
    assert latency.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert latency.percentile([float(n) for n in range(101)], 0.95) == pytest.approx(95)
    assert latency.percentiles_ms([]) is None


def test_the_histogram_holds_every_value() -> None:
    chosen = random.Random(1)
    seconds = [chosen.lognormvariate(-4, 0.3) for _ in range(500)] + [0.2, 0.0]
    found = latency.describe_ms(seconds)
    assert sum(count for _, count in found["histogram"]) == found["n"] == 502
    edges = [edge for edge, _ in found["histogram"]]
    assert edges == sorted(edges)
    assert sum(count for edge, count in found["histogram"] if edge <= 100) == sum(1 for s in seconds if s <= 0.1)
    assert found["max"] == 200
    assert latency.describe_ms([]) == {"p50": None, "p95": None, "p99": None, "max": None, "n": 0, "histogram": []}
