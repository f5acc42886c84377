"""Writes the references of the gate's texts: what transformers computes in float32 from the same weights.

    PYTHONPATH=module_utils:. STACK/bin/python -m tests.gates.references [--smollm2 FOLDER]

Runs in a stack's interpreter. Writes files/gates/references/tiny_glm.json, or with --smollm2 the one of the checkpoint
in FOLDER (deployments.py makes it), tests/gates/smollm2_reference.json.
"""

# The lint environment has no torch and no transformers.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from octoserve import atomic, reference, scoring
from octoserve.coherence_suite import Score, parse_suite

from tests.fixtures.tiny_glm import glm_gguf
from tests.fixtures.tiny_glm.reference import build_model
from tests.fixtures.tiny_glm.shapes import GlmShape

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/fixtures/tiny_glm"
TINY_REFERENCE = ROOT / "files/gates/references/tiny_glm.json"
SMOLLM2_REFERENCE = ROOT / "tests/gates/smollm2_reference.json"


def texts(suite: Path) -> list[Score]:
    """The scored texts of a suite."""
    cases = parse_suite(yaml.safe_load(suite.read_text(encoding="utf-8"))).cases
    return [case for case in cases if isinstance(case, Score)]


def tiny_glm() -> dict[str, dict[str, Any]]:
    """The tiny model's references."""
    model = build_model(GlmShape(), glm_gguf.read_state(sorted(TINY.glob("*-of-*.gguf"))))
    return references(model, transformers.AutoTokenizer.from_pretrained(TINY), texts(ROOT / "files/gates/tiny_glm.yml"))


def smollm2(folder: Path) -> dict[str, dict[str, Any]]:
    """SmolLM2's references, from its checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return references(model, tokenizer, texts(ROOT / "tests/gates/smollm2_suite.yml"))


def references(model: Any, tokenizer: Any, cases: list[Score]) -> dict[str, dict[str, Any]]:
    """Of each text its entry. A text without a prompt gives away its first token."""
    found = {}
    for case in cases:
        given, scored = [], tokenizer.encode(case.text, add_special_tokens=not case.messages)
        if case.messages:
            given = tokenizer.apply_chat_template(case.messages, add_generation_prompt=True, return_dict=False)
        tokens = torch.tensor([[*given, *scored]])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, :-1].double().log_softmax(-1)
        of_tokens = logprobs.gather(1, tokens[0, 1:, None])[max(len(given) - 1, 0) :, 0].tolist()
        found[case.name] = {
            "identity": case.identity({}),
            "logprobs": [round(value, scoring.DIGITS) for value in of_tokens],
            "perplexity": round(scoring.perplexity(of_tokens), scoring.DIGITS),
            "source": f"transformers {transformers.__version__}, float32",
        }
    return found


def main() -> None:
    """Write one of the two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER")
    folder = parser.parse_args().smollm2
    path, found = (SMOLLM2_REFERENCE, smollm2(folder)) if folder else (TINY_REFERENCE, tiny_glm())
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, reference.text(found))
    for name, entry in found.items():
        print(f"{name}: {len(entry['logprobs'])} tokens, perplexity {entry['perplexity']:.6g}")


if __name__ == "__main__":
    main()
