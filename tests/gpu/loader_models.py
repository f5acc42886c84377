"""Writes the models of loader.yml and what transformers says to them. Runs in the stack's interpreter.

``loader_models.py FOLDER`` makes for each model a folder with ``model*.gguf``, ``config.json``, ``prompts.json``
(a list of ``{"name", "prompt", "answer"}``, token ids) and ``reference.npz``: for prompt N ``sparse_N`` where the model
has an indexer, and ``dense_N`` for random models and prompts of at most DENSE_LIMIT tokens, natural-log probabilities
(prompt + answer - 1, vocabulary) of every next token, the answer fed. The trained model's answer is greedy; a random
model's is one token ANSWER times, which a bias on its logit makes any engine say.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fixtures.tiny_glm import corpus, glm_gguf, reference, shapes, tokenizer
from tests.gpu import mtp_head

# The indexer's head weights are quantized in some files: the name of that tensor was once mangled while loading.
MIX: glm_gguf.TypeMix = ((r"indexer\.proj", gguf.GGMLQuantizationType.Q8_0), *glm_gguf.UD_Q4_K_XL)
ANSWER = 24
DENSE_LIMIT = 1000


def make_trained(folder: Path, mtp: bool) -> None:
    """The fixture's splits, or one file of them and an MTP head, with the gates' prompts."""
    shape = shapes.GlmShape(mtp_layers=int(mtp))
    splits = sorted(glm_gguf.HERE.glob("*-of-*.gguf"))
    model = reference.build_model(shapes.GlmShape(), glm_gguf.read_state(splits))
    if mtp:
        head = mtp_head.train(model, shape)
        mtp_head.write_with_head(folder / "model.gguf", splits, head.state(shape), shape)
    else:
        for number, split in enumerate(splits, 1):
            (folder / f"model-{number:05}-of-{len(splits):05}.gguf").symlink_to(split)
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    words = tokenizer.load_tokenizer()
    prompts: list[dict[str, Any]] = [
        {
            "name": exchange.name,
            "prompt": tokenizer.prompt_ids(words, exchange),
            "answer": tokenizer.answer_ids(words, exchange),
        }
        for exchange in corpus.read_corpus()
        if exchange.gate
    ]
    for prompt in prompts:
        answer = reference.greedy(model, prompt["prompt"], len(prompt["answer"]) + 8, words.eos_token_id)
        assert answer == prompt["answer"], f"transformers does not say the corpus' answer to {prompt['name']}"
    write_reference(folder, prompts, {"sparse": model})


def make_random(folder: Path, case: dict[str, Any]) -> None:
    """A random model, its weights scaled as the case says."""
    shape = shapes.from_options(case["shape"])
    state = glm_gguf.random_state(shape, case["seed"])
    for pattern, gain in case["gains"].items():
        state |= {name: values * np.float32(gain) for name, values in state.items() if re.search(pattern, name)}
    state = glm_gguf.write_gguf(folder / "model.gguf", shape, state=state, mix=MIX)
    (folder / "config.json").write_text(json.dumps(shape.config() | case.get("config", {})), encoding="utf-8")
    models = {"dense": reference.build_model(replace(shape, index_topk=shape.max_position), state)}
    if shape.has_indexer(0):
        models["sparse"] = reference.build_model(shape, state)
    random = np.random.default_rng(case["seed"])
    prompts: list[dict[str, Any]] = [
        {"name": f"{size} tokens", "prompt": [int(token) for token in random.integers(10, shape.vocabulary, size)]}
        for size in case["prompts"]
    ]
    for prompt in prompts:
        prompt["answer"] = [int(random.integers(10, shape.vocabulary))] * ANSWER
    write_reference(folder, prompts, models)


def write_reference(folder: Path, prompts: list[dict[str, Any]], models: dict[str, torch.nn.Module]) -> None:
    """What each model says to the prompts."""
    arrays: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        tokens = [*prompt["prompt"], *prompt["answer"]]
        for attention, model in models.items():
            if attention == "sparse" or len(tokens) <= DENSE_LIMIT:
                arrays[f"{attention}_{number}"] = reference.log_probabilities(model, tokens[:1], tokens[1:]).numpy()
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    np.savez(folder / "reference.npz", **arrays)


def main() -> None:
    """Write every model into the folder named on the command line; one that is there stays."""
    out = Path(sys.argv[1])
    models = yaml.safe_load(Path(__file__).with_name("loader.yml").read_text(encoding="utf-8"))["models"]
    for name, case in models.items():
        if (out / name).exists():
            continue
        partial = out / f".{name}.partial"
        partial.mkdir(parents=True)
        if case.get("trained"):
            make_trained(partial, case.get("mtp", False))
        else:
            make_random(partial, case)
        partial.rename(out / name)
        print(f"made {name}", flush=True)


if __name__ == "__main__":
    main()
