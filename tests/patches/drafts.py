"""Serves models of make_models.py with their MTP block and compares what it drafts with ``draft.npz``.

``drafts.py OPTIONS FOLDER...`` prints one line of JSON. For each folder's name it holds ``{"difference": …,
"drafts": …}``, the largest absolute difference of a draft's natural-log probability over the whole vocabulary and
the number of drafts, or ``{"error": …}``. OPTIONS is JSON of further arguments of ``vllm.LLM``.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import score
import torch

# A draft does not take the target's backend.
SPECULATIVE = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}}


class Recorder:
    """Keeps the log probabilities of each draft of one request, and the position whose hidden state it is made from."""

    def __init__(self, drafter: Any) -> None:
        self.drafts: list[tuple[int, torch.Tensor]] = []
        propose, compute_logits = drafter.propose, drafter.model.compute_logits
        logits: list[torch.Tensor] = []

        def recording_logits(*arguments: Any, **options: Any) -> torch.Tensor:
            logits.append(compute_logits(*arguments, **options))
            return logits[-1]

        def recording(*, target_positions: torch.Tensor, token_indices_to_sample: Any, **options: Any) -> Any:
            drafted = propose(
                target_positions=target_positions, token_indices_to_sample=token_indices_to_sample, **options
            )
            last = len(target_positions) - 1 if token_indices_to_sample is None else int(token_indices_to_sample[0])
            self.drafts.append((int(target_positions[last]), torch.log_softmax(logits[-1][0].float(), dim=-1)))
            return drafted

        drafter.propose, drafter.model.compute_logits = recording, recording_logits


def compare(model: Any, recorder: Recorder, folder: Path) -> dict[str, Any]:
    """Draft after draft of each prompt's greedy answer, one request at a time."""
    from vllm import SamplingParams

    reference = np.load(folder / "draft.npz")
    answers = np.load(folder / "reference.npz")
    worst, count = 0.0, 0
    for number, prompt in enumerate(json.loads((folder / "prompts.json").read_text())):
        sampling = SamplingParams(
            temperature=0, max_tokens=len(answers[f"answer_{number}"]), ignore_eos=True, detokenize=False
        )
        recorder.drafts.clear()
        output = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        if list(output.token_ids) != list(answers[f"answer_{number}"]):
            raise ValueError(f"found the answer {list(output.token_ids)} to prompt {number}, wanted the reference's")
        wanted = reference[f"logprobs_{number}"]
        for position, values in recorder.drafts:
            if position < len(wanted):  # a draft after the answer's last token has no reference
                worst = max(worst, float(np.abs(values.numpy() - wanted[position]).max()))
                count += 1
    return {"difference": worst, "drafts": count}


def run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load and compare one model."""
    try:
        model = score.load(folder, {**SPECULATIVE, **options})
        runner = model.llm_engine.model_executor.driver_worker.worker.model_runner
        return compare(model, Recorder(runner.drafter), folder)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Compare the folders of the command line."""
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's own output goes to stderr
    options = json.loads(sys.argv[1])
    results = {folder.name: run(folder, options) for folder in map(Path, sys.argv[2:])}
    os.write(out, (json.dumps(results) + "\n").encode())


if __name__ == "__main__":
    main()
