"""Writes the models of cases.yml and what transformers says to them. Runs in the stack's interpreter.

For each case: ``model*.gguf`` and ``config.json``, ``prompts.json`` (token ids) and ``reference.npz``: for each
prompt the greedy continuation ``answer_N`` (token ids) and ``logprobs_N``, natural-log probabilities
(prompt + answer - 1, vocabulary) of every next token. With an MTP block also ``draft.npz``: for each prompt
``draft_N``, the token that the block drafts in each of the same rows for one position further, and ``logprobs_N``.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fixtures.tiny_glm import glm_gguf, reference, shapes

Kind = gguf.GGMLQuantizationType
MIXES: dict[str, glm_gguf.TypeMix] = {
    "ud_q4_k_xl": glm_gguf.UD_Q4_K_XL,
    "legacy_types": (
        (r"^token_embd", Kind.F16),
        (r"^output\.weight", Kind.BF16),
        (r"ffn_gate_exps", Kind.Q4_0),
        (r"ffn_up_exps", Kind.Q5_1),
        (r"ffn_down_exps", Kind.Q8_0),
        (r"attn_k_b", Kind.Q5_0),
        (r"attn_(v|kv)_b", Kind.Q4_1),
        (r"(attn_q_a|attn_output|ffn_(gate|up|down)_shexp)\.weight", Kind.Q8_0),
        (r"(attn_q_b|attn_kv_a_mqa)\.weight", Kind.Q5_0),
    ),
    # As Unsloth's UD-IQ2_XXS and UD-Q2_K_XL: two to three bits for the experts, more for what every token passes.
    "ud_2_bits": (
        (r"^token_embd", Kind.Q4_K),
        (r"(^output|attn_output|attn_q_a|ffn_(gate|up|down)(_shexp)?)\.weight", Kind.Q5_K),
        (r"attn_(k_b|v_b|kv_a_mqa)", Kind.Q8_0),
        (r"blk\.1\.ffn_(gate|up)_exps", Kind.IQ2_XXS),
        (r"blk\.1\.ffn_down_exps", Kind.IQ3_XXS),
        (r"blk\.2\.ffn_(gate|up)_exps", Kind.Q2_K),
        (r"blk\.2\.ffn_down_exps", Kind.Q3_K),
        (r"attn_q_b", Kind.Q6_K),
    ),
    "other_iq_types": (
        (r"^token_embd", Kind.IQ4_NL),
        (r"^output\.weight|attn_q_b", Kind.IQ4_XS),
        (r"blk\.0\.ffn_(gate|up)_exps", Kind.IQ2_XS),
        (r"blk\.0\.ffn_down_exps", Kind.IQ3_S),
        (r"blk\.1\.ffn_(gate|up)_exps", Kind.IQ1_S),
        (r"blk\.1\.ffn_down_exps", Kind.IQ2_S),
        (r"attn_k_b", Kind.IQ4_NL),
        (r"attn_v_b|attn_output|shexp", Kind.IQ4_XS),
        (r"attn_(q_a|kv_a_mqa)\.weight", Kind.Q8_0),
    ),
    "half_precision": (
        (r"(attn_q_a|attn_k_b|ffn_(gate|up)(_exps|_shexp)?|output|shared_head_head)\.weight$", Kind.BF16),
        (r"(attn_(q_b|v_b|kv_a_mqa|output)|ffn_down(_exps|_shexp)?|eh_proj|indexer\.attn_(k|q_b))\.weight$", Kind.F16),
        (r"(token_embd|embed_tokens)\.weight$", Kind.F16),
    ),
}
ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "as_converted": list,
    "reversed": lambda names: names[::-1],
    "shuffled": lambda names: random.Random(0).sample(names, len(names)),
}
PROMPT_LENGTHS = (41, 7, 1)
ANSWER = 6


def make(folder: Path, case: dict[str, Any]) -> None:
    """Write one case."""
    folder.mkdir(parents=True)
    shape = shapes.from_options(case["shape"])
    state = glm_gguf.write_gguf(
        folder / "model.gguf",
        shape,
        seed=case["seed"],
        mix=MIXES[case["mix"]],
        tensors_per_split=case.get("tensors_per_split", 0),
        order=ORDERS[case.get("order", "as_converted")],
    )
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    generator = np.random.default_rng(case["seed"])
    prompts = [[int(token) for token in generator.integers(10, shape.vocabulary, size)] for size in PROMPT_LENGTHS]
    model = reference.build_model(shape, state)
    answers = write_reference(folder, model, prompts)
    if shape.mtp_layers:
        drafts = [
            reference.draft_log_probabilities(model, shape, state, [*prompt, *answer]).numpy()
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        arrays = {f"logprobs_{number}": values for number, values in enumerate(drafts)}
        arrays |= {f"draft_{number}": values.argmax(-1) for number, values in enumerate(drafts)}
        np.savez(folder / "draft.npz", **arrays)


def write_reference(folder: Path, model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """Write what transformers says to the prompts, and return its answers."""
    answers: list[list[int]] = []
    arrays: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        answer: list[int] = []
        for _ in range(ANSWER):
            tokens = [*prompt, *answer, 0]  # the last one only asks for the distribution before it
            answer.append(int(reference.log_probabilities(model, tokens[:1], tokens[1:])[-1].argmax()))
        answers.append(answer)
        logprobs = reference.log_probabilities(model, prompt[:1], [*prompt[1:], *answer])
        arrays |= {f"answer_{number}": np.array(answer), f"logprobs_{number}": logprobs.numpy()}
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    np.savez(folder / "reference.npz", **arrays)
    return answers


def main() -> None:
    """Write every case into the folder named on the command line."""
    out = Path(sys.argv[1])
    cases = yaml.safe_load(Path(__file__).with_name("cases.yml").read_text(encoding="utf-8"))
    for name, case in cases.items():
        make(out / name, case)


if __name__ == "__main__":
    main()
