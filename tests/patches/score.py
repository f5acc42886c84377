"""Serves models of make_models.py in this interpreter's vLLM and compares with transformers and llama.cpp.

``score.py OPTIONS FOLDER...`` prints one line of JSON. For each folder's name it holds
``{"difference": …, "same_tokens": …}``, the largest absolute difference from transformers of a natural-log
probability over all positions and tokens, or ``{"error": …}``, what loading or answering ended in. Where the folder
has a ``llama_cpp.npz``, ``llama_cpp`` is the same from llama.cpp on the file's weights, and ``llama_cpp_quantized``
the mean difference from llama.cpp on the file as it is. OPTIONS is JSON of further arguments of
``vllm.LLM``, and of ``score`` below.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]


def load(folder: Path, options: dict[str, Any]) -> Any:
    """The model of a folder, as a profile of the CPU would serve it."""
    from vllm import LLM

    return LLM(
        model=str(sorted(folder.glob("model*.gguf"))[0]),
        hf_config_path=str(folder),
        hf_overrides={"index_topk": 0},
        skip_tokenizer_init=True,
        dtype="float32",
        attention_backend="CPU_MLA",  # AMX_MLA, the choice of a CPU with AMX, has no float32
        enforce_eager=True,
        max_model_len=128,
        max_logprobs=-1,
        **options,
    )


def score(model: Any, folder: Path, reference: str = "reference.npz", save_as: str = "") -> dict[str, Any]:
    """Differences of log probabilities, as far as the answers have the same tokens.

    *save_as* names a file of the folder that another run can take as its *reference*.
    """
    from vllm import SamplingParams

    prompts = json.loads((folder / "prompts.json").read_text())
    wanted = np.load(folder / reference)
    length = len(wanted["answer_0"])
    sampling = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, prompt_logprobs=-1, logprobs=-1, detokenize=False
    )
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    found: list[Floats] = []
    same = True
    for number, output in enumerate(outputs):
        answer, tokens = list(wanted[f"answer_{number}"]), output.outputs[0].token_ids
        agreed = next((n for n in range(length) if answer[n] != tokens[n]), length)
        positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs[: agreed + 1]]
        vocabulary = wanted[f"logprobs_{number}"].shape[1]
        found.append(np.array([[position[token].logprob for token in range(vocabulary)] for position in positions]))
        same = same and agreed == length
    if save_as:
        answers = {f"answer_{number}": output.outputs[0].token_ids for number, output in enumerate(outputs)}
        logprobs = {f"logprobs_{number}": values for number, values in enumerate(found)}
        np.savez(folder / save_as, allow_pickle=False, **answers, **logprobs)
    result = {"difference": float(differences(found, wanted, "logprobs").max()), "same_tokens": same}
    if (folder / "llama_cpp.npz").exists():
        other = np.load(folder / "llama_cpp.npz")
        result["llama_cpp"] = float(differences(found, other, "logprobs").max())
        result["llama_cpp_quantized"] = float(differences(found, other, "quantized").mean())
    return result


def differences(found: Sequence[Floats], reference: Mapping[str, Floats], name: str) -> Floats:
    """Absolute differences (positions, vocabulary), infinite where there is no number."""
    pairs = [(values, reference[f"{name}_{number}"][: len(values)]) for number, values in enumerate(found)]
    finite: Floats = np.nan_to_num(np.concatenate([np.abs(ours - theirs) for ours, theirs in pairs]), nan=np.inf)
    return finite


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
        files = {key: options[key] for key in ("reference", "save_as") if key in options}
        model = load(folder, {key: value for key, value in options.items() if key not in files})
        result = score(model, folder, **files)
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
