"""A script that answers questions about a kernel line by line, in one process for all tests of a module."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

from conftest import CACHE, ENVIRONMENT, HERE, Stack

#: Largest shared memory of a block in bytes: CUDA programming guide, technical specifications per compute capability.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
Case = dict[str, Any]
Ask = Callable[..., dict[str, Any]]


class Worker:
    """The process of a script of this folder in a stack's interpreter, ended with the context."""

    def __init__(self, stack: Stack, script: str, *options: str, **variables: str) -> None:
        self._command = [stack.python, str(HERE / script), *options]
        self._environment = {**os.environ, **ENVIRONMENT, "TRITON_CACHE_DIR": str(CACHE / "cache/triton"), **variables}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, question: Case) -> Any:
        """The answer to one question; an error where it ends the process, which then starts again."""
        if self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else {"error": f"exit {self._process.wait()}"}
