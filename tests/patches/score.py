"""Serves models of make_models.py in this interpreter's vLLM and compares with transformers.

``score.py OPTIONS FOLDER...`` prints one line of JSON. For each folder's name it holds
``{"difference": …, "same_tokens": …}``, the largest absolute difference of a natural-log probability over all
positions and tokens, or ``{"error": …}``, what loading or answering ended in. OPTIONS is JSON of further arguments
of ``vllm.LLM``.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def load(folder: Path, options: dict[str, Any]) -> Any:
    """The model of a folder, as a profile of the CPU would serve it."""
    from vllm import LLM

    return LLM(
        model=str(sorted(folder.glob("model*.gguf"))[0]),
        hf_config_path=str(folder),
        hf_overrides={"index_topk": 0},
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_logprobs=-1,
        **options,
    )


def score(model: Any, folder: Path) -> dict[str, Any]:
    """Largest absolute difference of a log probability, as far as the answers have the same tokens."""
    from vllm import SamplingParams

    prompts = json.loads((folder / "prompts.json").read_text())
    wanted = np.load(folder / "reference.npz")
    length = len(wanted["answer_0"])
    sampling = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, prompt_logprobs=-1, logprobs=-1, detokenize=False
    )
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    worst, same = 0.0, True
    for number, output in enumerate(outputs):
        reference = wanted[f"logprobs_{number}"]
        answer, found = list(wanted[f"answer_{number}"]), output.outputs[0]
        agreed = next((n for n in range(length) if answer[n] != found.token_ids[n]), length)
        positions = [*output.prompt_logprobs[1:], *found.logprobs[: agreed + 1]]
        values = np.array([[position[token].logprob for token in range(reference.shape[1])] for position in positions])
        difference = np.abs(values - reference[: len(values)]).max()
        worst = max(worst, float("inf") if np.isnan(difference) else float(difference))
        same = same and agreed == length
    return {"difference": worst, "same_tokens": same}


def check_command_line() -> None:
    """`vllm serve` starts with the command line that `vllm --version` starts with."""
    from vllm.entrypoints.cli.main import main as command_line

    arguments, sys.argv = sys.argv, ["vllm", "--version"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        command_line()
    sys.argv = arguments


def run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load, score and let go of one model."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        model = load(folder, options)
        result = score(model, folder)
        del model
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    cleanup_dist_env_and_memory()
    gc.collect()
    return result


def main() -> None:
    """Score the folders of the command line."""
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's own output goes to stderr
    options = json.loads(sys.argv[1])
    folders = [Path(argument) for argument in sys.argv[2:]]
    try:
        check_command_line()
        results = {folder.name: run(folder, options) for folder in folders}
    except Exception as error:
        results = {folder.name: {"error": f"{type(error).__name__}: {error}"} for folder in folders}
    os.write(out, (json.dumps(results) + "\n").encode())


if __name__ == "__main__":
    main()
