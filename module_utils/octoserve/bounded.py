"""What talks to a driver, which may never return: subprocess.run would wait for what it killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

T = TypeVar("T")
#: Seconds that a child gets to end by itself.
END_S = 2.0


def run(command: Sequence[str], timeout_s: float) -> str:
    """What a program says within so many seconds; empty where it says nothing, does not start or does not end.

    One that hangs in the kernel is left there: no signal ends it, and who waits for it hangs as well.
    """
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            process.kill()
        return ""


@contextlib.contextmanager
def session(
    opened: Callable[[], AbstractContextManager[Callable[[], T]]], timeout_s: float
) -> Iterator[Callable[[], T]]:
    """A context manager in a child, which may hang in the kernel and is left there, as above.

    ``opened`` gives a function: yielded is one that calls it in the child. The opening and each call get ``timeout_s``
    seconds, then they raise TimeoutError; EOFError where the child died; else what was raised in it.
    """
    ours, theirs = multiprocessing.Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            _serve(opened, theirs)
        finally:
            os._exit(0)
    theirs.close()

    def answer() -> Any:
        if not ours.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        try:
            good, value = ours.recv()
        except OSError as error:
            raise EOFError(str(error)) from error
        if not good:
            raise value
        return value

    def ask() -> T:
        with contextlib.suppress(OSError):  # of a child that died: the answer's end says so
            ours.send(None)
        value: T = answer()
        return value

    try:
        answer()
        yield ask
    finally:
        ours.close()
        _end(child)


def _serve(opened: Callable[[], AbstractContextManager[Callable[[], Any]]], pipe: Any) -> None:
    """The child: a message when it is open, and one for each that comes, until the other side closes."""
    try:
        with opened() as call:
            pipe.send((True, None))
            with contextlib.suppress(EOFError):
                while True:
                    pipe.recv()
                    pipe.send((True, call()))
    except Exception as error:  # it is raised on the other side
        pipe.send((False, error))


def _end(child: int) -> None:
    """Let a child end, then kill it, and do not wait for one that not even that ends."""
    until = time.monotonic() + END_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            return
        time.sleep(0.01)
