#!/usr/bin/env python3
"""Compares the sparse attention backends on a slice of GLM-5: three layers of its real dimensions, random weights.

    real_slice.py OUT.json [--python PYTHON] [--commit COMMIT] [--models FOLDER] [--cpu]

Every backend is served by name in the patched stack and says of each position of the prompts, whose contexts are
shorter and much longer than index_topk, which token is the likeliest, and goes on greedily. What TRITON_MLA_SPARSE says
is held to FLASHMLA_SPARSE; how far FLASH_ATTN_MLA_SPARSE lies from that is the yardstick. A fault in the kernel has to
be seen. With the 64 heads of the model, and with 8 as one of eight cards has them. PYTHON is the interpreter of an
installed, unpatched CUDA stack; the models stay in FOLDER, where one is named. With --cpu, a dry run of the machinery:
small, dense, one backend against itself.
"""

# The lint environment has no torch, numpy or vLLM.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "module_utils"), str(ROOT / "tests/patches")]

from tests.gpu import loader_proof
from tests.gpu.loader_proof import Case

STOCK = "FLASHMLA_SPARSE"
BACKENDS = ("TRITON_MLA_SPARSE", STOCK, "FLASH_ATTN_MLA_SPARSE")
ROPE_LEFT_OUT = {
    "file": "vllm/v1/attention/ops/triton_mla_sparse.py",
    "old": "            scores += tl.dot(q_rope, tl.trans(k_rope))\n",
    "new": "            scores += 0.0 * tl.dot(q_rope, tl.trans(k_rope))\n",
}
#: GLM-5's (tests/fixtures/glm5_header.py) but for layers, experts and vocabulary.
DIMENSIONS = {
    "layers": 3, "hidden": 6144, "q_lora": 2048, "kv_lora": 512, "nope": 192, "rope": 64, "value": 256,
    "intermediate": 12288, "moe_intermediate": 2048, "experts": 4, "experts_per_token": 4, "vocabulary": 4096,
    "index_heads": 32, "index_head_dim": 128, "index_topk": 2048, "max_position": 32768,
}  # fmt: skip
#: As loader.yml's: attention that is soft, all experts chosen, logits that decide.
GAINS = {"lm_head": 3.0, "q_b_proj": 0.5, "down_proj": 0.3, "o_proj": 0.7}
HEADS = (64, 8)
PROMPTS = (1000, 2000, 6000, 24000)
ANSWER = 48
CPU_DIMENSIONS = {"layers": 2, "experts": 4, "experts_per_token": 4, "vocabulary": 640, "max_position": 512}
#: Nats between the first choice and the second from which rounding cannot exchange them, and the least share of equal
#: first choices among such positions: within index_topk, and beyond, where the indexer's FP8 scores near its threshold
#: choose other keys. In the first run all agreed, with the fault 0.976.
DECIDED, WITHIN, BEYOND = 1.0, 1.0, 0.99


def write_model(folder: Path, heads: int, cpu: bool) -> None:
    """A GGUF of bf16 matrices and its config.json; one that is there stays."""
    if folder.exists():
        return
    import numpy as np
    from gguf import GGMLQuantizationType as Kind

    from tests.fixtures.tiny_glm import glm_gguf, shapes

    shape = shapes.from_options({**(CPU_DIMENSIONS if cpu else DIMENSIONS), "heads": heads})
    state = glm_gguf.random_state(shape, seed=heads)
    for part, gain in GAINS.items():
        state |= {name: values * np.float32(gain) for name, values in state.items() if part in name}
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    matrices = [(r"(attn_(q_a|q_b|kv_a_mqa|k_b|v_b|output)|attn_k|ffn_\w+|token_embd|^output)\.weight$", Kind.BF16)]
    plain = [(r"norm|ffn_gate_inp|exp_probs|indexer\.proj", Kind.F32)]
    glm_gguf.write_gguf(partial / "model.gguf", shape, state=state, mix=[*plain, *matrices])
    (partial / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    partial.rename(folder)


def said(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What a backend says: of each prompt's positions the likeliest token, its lead in nats and the log probability of
    the token that follows; and as much of the tokens of its answer."""
    import numpy as np
    from vllm import LLM, SamplingParams

    folder = Path(asked["folder"])
    model = LLM(
        model=str(folder / "model.gguf"), hf_config_path=str(folder), skip_tokenizer_init=True, **asked["options"]
    )
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    random = np.random.default_rng(5)
    prompts = [[int(token) for token in random.integers(10, vocabulary, size)] for size in asked["prompts"]]
    sampling = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, prompt_logprobs=2, logprobs=2, detokenize=False
    )
    found = []
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    for prompt, output in zip(prompts, model.generate(inputs, sampling, use_tqdm=False), strict=True):
        answer = list(output.outputs[0].token_ids)
        found.append({
            "prompt": choices(output.prompt_logprobs[1:], prompt[1:]),
            "answer": choices(output.outputs[0].logprobs, answer),
        })  # fmt: skip
    return found


def choices(positions: list[dict[int, Any]], tokens: list[int]) -> dict[str, list[Any]]:
    """First choice, its lead over the second, and the log probability of the token that stands there."""
    ranked = [sorted(position.items(), key=lambda item: -item[1].logprob) for position in positions]
    return {
        "first": [row[0][0] for row in ranked],
        "lead": [round(row[0][1].logprob - row[1][1].logprob, 4) for row in ranked],
        "logprob": [
            round(position[token].logprob, 4) for position, token in zip(positions, tokens, strict=True)
        ],
    }  # fmt: skip


def serve_main() -> None:
    """One backend, in the stack's interpreter."""
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's own output goes to stderr
    try:
        asked = json.loads(sys.argv[2])
        Path(asked["answers"]).write_text(json.dumps(said(asked)), encoding="utf-8")
        import torch
        import triton
        import vllm

        versions = {"torch": torch.__version__, "triton": triton.__version__, "vllm": vllm.__version__}
        found: dict[str, Any] = {"versions": versions}
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    os.write(out, (json.dumps(found) + "\n").encode())
    sys.stderr.flush()
    os._exit(0)


def compare(stock: list[dict[str, Any]], other: list[dict[str, Any]], topk: int) -> dict[str, Any]:
    """Equal first choices where the stock backend is decided, within and beyond index_topk; the mean distance of log
    probabilities; and how many tokens of each answer are the same, with the stock's lead at the first that is not."""
    found: dict[str, Any] = {}
    rows: dict[str, list[tuple[bool, float, float]]] = {"within": [], "beyond": []}
    answers = []
    for wanted, given in zip(stock, other, strict=True):
        ours, theirs = given["prompt"], wanted["prompt"]
        for place, first in enumerate(theirs["first"]):
            row = (
                first == ours["first"][place],
                theirs["lead"][place],
                abs(ours["logprob"][place] - theirs["logprob"][place]),
            )
            rows["within" if place < topk else "beyond"].append(row)
        ours, theirs = given["answer"], wanted["answer"]
        same = next((n for n in range(ANSWER) if ours["first"][n] != theirs["first"][n]), ANSWER)
        answers.append({
            "context": len(wanted["prompt"]["first"]) + 1,
            "same": same,
            "lead_there": theirs["lead"][same] if same < ANSWER else None,
        })  # fmt: skip
    for name, part in rows.items():
        decided = [same for same, lead, _ in part if lead >= DECIDED]
        found[name] = {
            "positions": len(part),
            "decided": len(decided),
            "agreement": round(sum(decided) / max(1, len(decided)), 5),
            "logprob_apart": round(sum(distance for *_, distance in part) / max(1, len(part)), 5),
        }
    return {**found, "answers": answers}


def faults(comparison: dict[str, Any]) -> list[str]:
    """What is not as another right backend's."""
    found = []
    for name, least in (("within", WITHIN), ("beyond", BEYOND)):
        if comparison[name]["decided"] and comparison[name]["agreement"] < least:
            found.append(f"{name} index_topk {comparison[name]['agreement']} of the first choices, wanted {least}")
    found += [
        f"token {one['same']} after {one['context']} is another, though the stock backend leads by {one['lead_there']}"
        for one in comparison["answers"]
        if one["lead_there"] is not None and one["lead_there"] >= DECIDED
    ]
    return found


def main() -> int:
    """Serve all beside each other and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--commit", default="", help="what the tree is that this runs in")
    parser.add_argument("--models", type=Path, help="folder that keeps the models")
    parser.add_argument("--cpu", action="store_true", help="a dry run on a CPU stack")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": options.commit or loader_proof.commit(),
        "covers": ["tests/gpu/real_slice.py", "files/patches/vllm-0.32.0"],
        "cards": loader_proof.cards_here(),
        "dimensions": DIMENSIONS,
        "gains": GAINS,
        "decided": DECIDED,
    }
    rows: list[dict[str, Any]] = []
    record["rows"] = rows
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options, record, rows)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if rows and all(row["verdict"] == "ok" for row in rows) else 1


def run(folder: Path, options: argparse.Namespace, record: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Each backend and the fault with each number of heads."""
    cases = [
        Case("patched", {}),
        Case("rope_left_out", {"edit": ROPE_LEFT_OUT, "fails_with": "difference"}),
    ]
    made = loader_proof.sites(cases, folder / "sites", options.python)
    for site in made.values():
        if isinstance(site, str):
            raise RuntimeError(site)
    heads_here = HEADS[1:] if options.cpu else HEADS
    models, script = options.models or folder, str(Path(__file__).resolve())
    writing = [
        subprocess.Popen(
            [options.python, script, "--write", str(models / f"{heads}_heads"), str(heads), str(options.cpu)]
        )
        for heads in heads_here
    ]
    if [process.args for process in writing if process.wait()]:
        raise RuntimeError("a model could not be written")
    print("models written", flush=True)
    backends = [("CPU_MLA", ""), (STOCK, "")] if options.cpu else [(name, "") for name in BACKENDS]
    if not options.cpu:
        backends.append((BACKENDS[0], "rope_left_out"))
    jobs = [(heads, backend, fault) for heads in heads_here for backend, fault in backends]

    def one(job: tuple[int, str, str]) -> list[dict[str, Any]]:
        heads, backend, fault = job
        name = f"{heads}-{backend}-{fault}"
        serving = loader_proof.CPU_OPTIONS if options.cpu else loader_proof.OPTIONS | {"attention_backend": backend}
        if options.cpu:
            serving = serving | {"hf_overrides": {"index_topk": 0}}
        asked = {
            "folder": str(models / f"{heads}_heads"),
            "prompts": (30, 300) if options.cpu else PROMPTS,
            "answers": str(folder / f"{name}.json"),
            "options": {
                **serving,
                "max_model_len": (CPU_DIMENSIONS if options.cpu else DIMENSIONS)["max_position"],
                "tensor_parallel_size": 1,
            },
            "environment": {},
        }
        log = options.output.with_name(f"{name}.log")
        site = made[fault]
        assert isinstance(site, Path)
        found = loader_proof.serve([options.python, script, "--serve"], site, asked, None if options.cpu else "0", log)
        if "error" in found:
            raise RuntimeError(f"{name}: {found['error']}")
        record["versions"] = found["versions"]
        print(f"{name} answered", flush=True)
        answers: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return answers

    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = dict(zip(jobs, pool.map(one, jobs), strict=True))
    for heads, backend, fault in jobs:
        if backend == STOCK:
            continue
        topk = 150 if options.cpu else DIMENSIONS["index_topk"]
        comparison = compare(answers[heads, STOCK, ""], answers[heads, backend, fault], topk)
        differs = faults(comparison)
        verdict = ("ok" if differs else "the fault is not seen") if fault else "; ".join(differs) or "ok"
        rows.append({"heads": heads, "backend": backend, "fault": fault, "verdict": verdict, **comparison})
        print(rows[-1], flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_main()
    if sys.argv[1:2] == ["--write"]:
        write_model(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True")
        sys.exit()
    sys.exit(main())
