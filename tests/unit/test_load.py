"""The load generator: as many streams as wanted, no longer than allowed, and honest about what it costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from fake_openai_server import Body, FakeOpenAiServer, Reply
from octoserve import load, patience
from octoserve.load import Cost, Prompt
from octoserve.openai_api import ApiError, Client

BUSY = Reply(status=429, headers={"Retry-After": "0"})
FAIR = Reply("1 2 3 4", token_s=0.001)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"prompt {n}", 8) for n in range(count)]


def test_so_many_streams_run_side_by_side_and_every_prompt_is_asked_once() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def script(_body: Body) -> Reply:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return FAIR

    with FakeOpenAiServer(script) as server:
        done = load.run(Client(server.url), prompts(12), 4)
    assert most == 4
    assert sorted(body["messages"][0]["content"] for body in server.requests) == sorted(p.text for p in prompts(12))
    assert [answer.error for answer in done.answers] == [""] * 12
    assert all(0 <= answer.started < answer.ended for answer in done.answers)


def test_options_go_into_the_request() -> None:
    with FakeOpenAiServer(FAIR) as server:
        load.run(Client(server.url), [Prompt("a", 5, {"ignore_eos": True})], 1)
    assert (server.requests[0]["max_tokens"], server.requests[0]["ignore_eos"]) == (5, True)


def test_at_the_end_of_its_time_requests_are_cut_and_none_starts() -> None:
    with FakeOpenAiServer(Reply("a " * 400, token_s=0.01)) as server:
        done = load.run(Client(server.url), prompts(8), 2, seconds=0.4)
    assert done.cost.seconds < 1.5
    assert len(server.requests) == len(done.answers) == 2
    assert [answer.cut for answer in done.answers] == [True, True]


def test_a_silent_server_is_cut_too() -> None:
    with FakeOpenAiServer(Reply("a", ttft_s=3)) as server:
        done = load.run(Client(server.url), prompts(1), 1, seconds=0.3)
        assert done.cost.seconds < 1.5
    assert done.answers[0].cut


def test_what_fails_before_the_end_of_the_time_is_a_failure() -> None:
    with FakeOpenAiServer(Reply(status=500)) as server:
        done = load.run(Client(server.url), prompts(2), 1, seconds=5)
    assert [(answer.cut, "HTTP 500" in answer.error) for answer in done.answers] == [(False, True)] * 2
    assert len(server.requests) == 2


@pytest.mark.parametrize(("refusals", "tries"), [(1, 2), (2, 3)])
def test_a_full_server_is_asked_again(refusals: int, tries: int) -> None:
    replies: Iterator[Reply] = iter([*[BUSY] * refusals, FAIR])
    with FakeOpenAiServer(lambda _body: next(replies)) as server:
        done = load.run(Client(server.url), prompts(1), 1)
    assert len(server.requests) == tries
    assert (done.answers[0].error, done.answers[0].retries) == ("", refusals)


def test_a_server_that_stays_full_is_left_alone() -> None:
    with FakeOpenAiServer(BUSY) as server:
        done = load.run(Client(server.url), prompts(1), 1)
    assert len(server.requests) == patience.MAX_TRIES
    assert "HTTP 429" in done.answers[0].error


@pytest.mark.parametrize(
    ("header", "wait"),
    [("3", 3.0), ("0", 0.0), ("86400", patience.MAX_RETRY_WAIT_S), ("Mon, 30 Nov 2026 08:00:00 GMT", 1.0), (None, 1.0)],
)
def test_a_full_server_says_when_to_come_again(header: str | None, wait: float) -> None:
    waits: list[float] = []
    busy = Reply(status=503, headers={} if header is None else {"Retry-After": header})
    with FakeOpenAiServer(busy) as server, pytest.raises(ApiError, match="HTTP 503"):
        load.ask(Client(server.url), Prompt("a", 5), waits.append)
    assert waits == [wait] * (patience.MAX_TRIES - 1)


def test_waiting_to_ask_again_ends_with_the_time() -> None:
    with FakeOpenAiServer(Reply(status=429, headers={"Retry-After": "9"})) as server:
        done = load.run(Client(server.url), prompts(1), 1, seconds=0.3)
    assert done.cost.seconds < 1.5
    assert done.answers[0].cut


def test_a_generator_at_its_limit_is_the_bottleneck() -> None:
    assert not Cost(seconds=10, cpu_s=1, events=5000, starved=0.0).bottleneck
    assert Cost(seconds=10, cpu_s=8, events=5000, starved=0.0).bottleneck
    assert Cost(seconds=10, cpu_s=4, events=5000, starved=0.5).bottleneck
    assert Cost(seconds=10, cpu_s=8, events=5000, starved=0.0).ceiling == 625
    assert Cost(seconds=0, cpu_s=0, events=0, starved=0).ceiling is None


def test_costs_add_up() -> None:
    both = load.total([Cost(10, 1, 100, 0.1), Cost(30, 5, 500, 0.5)])
    assert (both.seconds, both.cpu_s, both.events) == (40, 6, 600)
    assert both.starved == pytest.approx(0.4)
    assert load.total([]).busy == 0


def test_the_cost_is_measured() -> None:
    """Reading costs processor time: some, and less than the machine has."""
    with FakeOpenAiServer(Reply("a " * 200, token_s=0.001)) as server:
        done = load.run(Client(server.url), prompts(4), 2)
    assert 0 < done.cost.cpu_s < done.cost.seconds
    assert done.cost.events >= 4 * 200
    assert 0 <= done.cost.starved < 1
