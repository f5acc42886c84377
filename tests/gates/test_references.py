"""The tiny model's reference is what transformers computes of the texts of today."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from octoserve import reference

from tests.gates import serving

FILE = serving.ROOT / "files/gates/references/tiny_glm.json"
CODE = "import json; from tests.gates import references; print(json.dumps(references.tiny_glm()))"
#: Nats. CPUs sum float32 in orders of their own, which moved a token of -14 nats by 5e-5; a fault moves some by 0.01.
ROUNDING = 2e-4


def test_the_file_holds_what_transformers_computes() -> None:
    command = [str(serving.PYTHON), "-c", CODE]
    path = f"{serving.ROOT / 'module_utils'}:{serving.ROOT}"
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    computed, kept = json.loads(done.stdout), reference.load(FILE)
    assert set(kept) == set(computed)
    for name, entry in kept.items():
        assert entry["identity"] == computed[name]["identity"], name
        assert entry["logprobs"] == pytest.approx(computed[name]["logprobs"], abs=ROUNDING), name
