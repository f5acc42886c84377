"""The load generator: streams of requests that run side by side, within a bounded time, and what they cost it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from .openai_api import ApiError, Chunk, Client
from .patience import patiently

# Share of one core from which on the interpreter, which runs one thread at a time, holds events back.
BOTTLENECK = 0.7
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Prompt:
    """One request: what is asked, and how long the answer may be. ``options`` go into the request."""

    text: str
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What became of a request: its stream, or the error; ``cut``: the time was over before its end.

    ``started`` and ``ended`` are seconds from the beginning of the load.
    """

    chunks: Sequence[Chunk]
    error: str
    cut: bool
    retries: int
    started: float
    ended: float


@dataclass(frozen=True)
class Cost:
    """What reading the streams cost: ``busy`` is the share of one core that the generator used, ``starved`` the mean
    share of the time that a stream's thread was ready to run and had no core (0 where the kernel does not say).
    """

    seconds: float
    cpu_s: float
    events: int
    starved: float

    @property
    def busy(self) -> float:
        """Share of one core."""
        return self.cpu_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def ceiling(self) -> float | None:
        """Events a second that one core could read at this cost each; None where there were none."""
        return self.events / self.cpu_s if self.events and self.cpu_s > 0 else None

    @property
    def bottleneck(self) -> bool:
        """Whether events may have waited for the generator."""
        return self.busy + self.starved > BOTTLENECK


@dataclass(frozen=True)
class Load:
    """All answers of a load, in the order of their ends, and the cost."""

    answers: Sequence[Answer]
    cost: Cost


def ask(client: Client, prompt: Prompt, sleep: Callable[[float], None] = time.sleep) -> tuple[list[Chunk], int]:
    """Stream one answer; 429 and 503 are asked again. Returns chunks and retries, raises ApiError."""
    messages = [{"role": "user", "content": prompt.text}]
    return patiently(lambda: client.stream_chat(messages, prompt.max_tokens, **prompt.options), sleep)


def run(client: Client, prompts: Iterable[Prompt], concurrency: int, seconds: float | None = None) -> Load:
    """Ask the prompts over ``concurrency`` streams, each the next one as soon as it is free.

    After ``seconds`` no request starts and those in flight are cut.
    """
    waiting, lock = iter(prompts), threading.Lock()
    began, cpu = time.monotonic(), time.process_time()
    deadline = None if seconds is None else began + seconds
    answers: list[Answer] = []

    def stream() -> float:
        """One stream of requests; returns the share of its time that it had no core."""
        entered, starved = time.monotonic(), _starved_s()
        while deadline is None or time.monotonic() < deadline:
            with lock:
                prompt = next(waiting, None)
            if prompt is None:
                break
            answer = _answer(client, prompt, began, deadline)
            with lock:
                answers.append(answer)
        return (_starved_s() - starved) / max(time.monotonic() - entered, 1e-9)

    with ThreadPoolExecutor(concurrency) as pool:
        shares = [future.result() for future in [pool.submit(stream) for _ in range(concurrency)]]
    events = sum(len(answer.chunks) for answer in answers)
    spent = Cost(time.monotonic() - began, time.process_time() - cpu, events, sum(shares) / len(shares))
    return Load(answers, spent)


def total(costs: Iterable[Cost]) -> Cost:
    """The cost of several loads together."""
    parts = list(costs)
    seconds = sum(part.seconds for part in parts)
    starved = sum(part.starved * part.seconds for part in parts) / seconds if seconds > 0 else 0.0
    return Cost(seconds, sum(part.cpu_s for part in parts), sum(part.events for part in parts), starved)


def _answer(client: Client, prompt: Prompt, began: float, deadline: float | None) -> Answer:
    """Ask one prompt within what is left of the time."""
    started = time.monotonic()
    left = client.timeout if deadline is None else min(client.timeout, max(deadline - started, 0.01))
    bounded = client.within(left)
    pause = threading.Event()
    try:
        chunks, retries = ask(bounded, prompt, lambda wait: _sleep(pause, wait, deadline))
    except ApiError as error:
        ended = time.monotonic()
        cut = deadline is not None and ended >= deadline
        return Answer((), str(error), cut, 0, started - began, ended - began)
    return Answer(chunks, "", False, retries, started - began, time.monotonic() - began)


def _sleep(pause: threading.Event, wait: float, deadline: float | None) -> None:
    """Sleep, but not past the deadline."""
    pause.wait(wait if deadline is None else max(0.0, min(wait, deadline - time.monotonic())))


def _starved_s() -> float:
    """Seconds that this thread was ready to run and waited for a core; 0 where the kernel does not say."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
