"""Programs that may never return are not waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
from octoserve import bounded


def test_what_a_program_says() -> None:
    assert bounded.run(["echo", "well"], timeout_s=10) == "well\n"


def test_one_that_does_not_end_or_start_says_nothing() -> None:
    began = time.monotonic()
    assert bounded.run(["sleep", "30"], timeout_s=0.2) == ""
    assert time.monotonic() - began < 10
    assert bounded.run(["/nowhere/tool"], timeout_s=1) == ""


@contextmanager
def counter() -> Iterator[Callable[[], int]]:
    """Counts its calls in the process that opened it; the third one does not return."""
    calls: list[None] = []

    def call() -> int:
        calls.append(None)
        if len(calls) == 3:
            time.sleep(60)
        return len(calls)

    yield call


def test_a_session_answers_from_one_child_and_leaves_a_call_that_does_not_return() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"), bounded.session(counter, timeout_s=0.5) as call:
        assert [call(), call()] == [1, 2], "both are of one child"
        call()
    assert time.monotonic() - began < 10


@contextmanager
def broken() -> Iterator[Callable[[], None]]:
    """Opens; its call fails."""

    def call() -> None:
        raise ValueError("of the child")

    yield call


def test_what_is_raised_in_the_child_is_raised_here() -> None:
    with pytest.raises(ValueError, match="of the child"), bounded.session(broken, timeout_s=10) as call:
        call()


@contextmanager
def dying() -> Iterator[Callable[[], None]]:
    """Opens; its call ends the process, as a library that crashes."""
    yield lambda: os._exit(1)


def test_a_child_that_dies_is_no_answer() -> None:
    with pytest.raises(EOFError), bounded.session(dying, timeout_s=10) as call:
        call()


def test_a_session_that_ends_leaves_no_child() -> None:
    with bounded.session(lambda: nullcontext(os.getpid), timeout_s=10) as pid:
        child = pid()
    assert child != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
