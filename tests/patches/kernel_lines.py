"""What the scripts that try a Triton kernel on the CPU share: one line of JSON asked, one answered. Runs in the stack's
interpreter, for workers.Worker."""

# The lint environment has no torch.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

COMPILES = "--compile" in sys.argv  # otherwise TRITON_INTERPRET=1 has to be set


def answer_all(
    load: Callable[[Path], ModuleType],
    run: Callable[[ModuleType, dict[str, Any]], Any],
    compile_all: Callable[[ModuleType, int], Any],
) -> None:
    """Run, or with --compile compile, the kernel that each line of the input names. An exception is answered too."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    kernels: dict[str, ModuleType] = {}
    for line in sys.stdin:
        question = json.loads(line)
        path = question["kernel"]
        try:
            kernels[path] = kernels.get(path) or load(Path(path))
            answer = compile_all(kernels[path], question["compile"]) if COMPILES else run(kernels[path], question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
