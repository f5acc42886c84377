#!/usr/bin/env python3
"""The gate's load generator beside `vllm bench serve`, on the same servers in one run: part of `make test-gates`.

    PYTHONPATH=module_utils:tests/patches python -m tests.gates.throughput_beside_vllm [--rounds N]

Two servers, the scripted one with exact pacing and real vLLM on the CPU with the tiny model. The tools ask in turns, so
many requests of so many tokens over one stream, then over four. (At the same moment they would run in step on a real
engine, and the prefill of the one that starts first would always be in the other's time to first token.) Compared are
the medians over the rounds. Writes tests/gates/throughput_beside_vllm.json (10
minutes on two cores). Ends 0 only where every number of the scripted server is within 2 %, and of the real one within
2 % or within what the tools' own rounds differ by.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octoserve import load, prompts, trial
from octoserve.openai_api import Client

from tests import results
from tests.gates import deployments, noisy_server, serving
from tests.gates.noisy_server import EXACT

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_suffix(".json")
TOKENIZER = ROOT / "tests/fixtures/tiny_glm"
COVERS = [
    *(f"module_utils/octoserve/{name}.py" for name in ("load", "openai_api", "prompts", "trial")),
    "tests/gates/noisy_server.py",
    "tests/gates/throughput_beside_vllm.py",
]
PROMPT_TOKENS, ANSWER_TOKENS = 64, 100
CONCURRENCY = (1, 4)
REQUESTS = 8  # of each stream
LIMIT_S = 300.0
BOUND = 0.02
Numbers = dict[str, float]


def sizing_of(client: Client, writer: prompts.Writer) -> prompts.Sizing:
    """How this server counts a prompt's tokens."""

    def prompt_tokens(text: str) -> int:
        usage = client.chat([{"role": "user", "content": text}], 1).usage
        assert usage
        return usage.prompt_tokens

    return prompts.size(writer, prompt_tokens)


def written(concurrency: int, writer: prompts.Writer, sizing: prompts.Sizing) -> list[str]:
    """Prompts for one round of one tool."""
    return [writer.text(sizing.words(PROMPT_TOKENS)) for _ in range(REQUESTS * concurrency)]


def ours(client: Client, concurrency: int, writer: prompts.Writer, sizing: prompts.Sizing) -> Numbers:
    """The gate's load generator and its measure of each stream."""
    texts = written(concurrency, writer, sizing)
    asked = [load.Prompt(text, ANSWER_TOKENS, {"ignore_eos": True}) for text in texts]
    done = load.run(client, asked, concurrency, LIMIT_S)
    failed = [answer.error for answer in done.answers if answer.error]
    if failed or len(done.answers) < len(asked):
        raise RuntimeError(f"{len(asked) - len(done.answers)} requests were not asked, {len(failed)} failed: {failed}")
    trials = [trial.measure(answer.chunks, bursts=True) for answer in done.answers]
    span = max(answer.ended for answer in done.answers) - min(answer.started for answer in done.answers)
    usages = [chunk.usage for answer in done.answers for chunk in answer.chunks if chunk.usage]
    return {
        "prompt_tokens": statistics.fmean(usage.prompt_tokens for usage in usages),
        "ttft_ms": 1000 * statistics.median(one.ttft_s for one in trials),
        "tpot_ms": statistics.fmean(1000 / one.decode_tok_s for one in trials),
        "itl_ms": 1000 * statistics.median(wait for answer in done.answers for wait in trial.gaps(answer.chunks)),
        "output_tok_s": sum(one.completion_tokens for one in trials) / span,
        "generator_busy": done.cost.busy,
        "generator_starved": done.cost.starved,
    }


def vllms(client: Client, texts: Sequence[str], concurrency: int, site: Path) -> Numbers:
    """`vllm bench serve`, asking prompts of our writer: its own 64 random tokens are 89 when their text is read again.

    Raises RuntimeError.
    """
    with tempfile.TemporaryDirectory() as folder:
        dataset, result = Path(folder) / "sharegpt.json", Path(folder) / "result.json"
        dataset.write_text(json.dumps([{"conversations": [{"value": text}, {"value": ""}]} for text in texts]))
        command = [str(serving.PYTHON), "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += ["--backend=openai-chat", "--endpoint=/v1/chat/completions", f"--base-url={client.base_url}"]
        command += [f"--model={client.model}", f"--tokenizer={TOKENIZER}", "--ignore-eos", "--temperature=0"]
        command += ["--dataset-name=sharegpt", f"--dataset-path={dataset}", f"--sharegpt-output-len={ANSWER_TOKENS}"]
        command += [f"--num-prompts={len(texts)}", f"--max-concurrency={concurrency}", "--disable-shuffle"]
        command += ["--disable-tqdm", "--save-result", f"--result-dir={folder}", f"--result-filename={result.name}"]
        done = subprocess.run(
            command,
            env=serving.environment(site),
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode or not result.exists():
            raise RuntimeError(f"vllm bench serve ended {done.returncode}: {done.stdout[-2000:]}")
        found = json.loads(result.read_text())
    if found["failed"] or found["total_output_tokens"] != len(texts) * ANSWER_TOKENS:
        raise RuntimeError(f"{found['failed']} requests failed, {found['total_output_tokens']} tokens came")
    return {
        "prompt_tokens": found["total_input_tokens"] / len(texts),
        "ttft_ms": found["median_ttft_ms"],
        "tpot_ms": found["mean_tpot_ms"],
        "itl_ms": found["median_itl_ms"],
        "output_tok_s": found["output_throughput"],
    }


def beside(url: str, model: str, site: Path, rounds: int) -> dict[str, Any]:
    """Both tools in turns on one server, by the number of streams."""
    client = Client(url, model, timeout=LIMIT_S)
    found: dict[str, Any] = {}
    for concurrency in CONCURRENCY:
        own, other = [], []
        for n in range(rounds):
            writer = prompts.Writer(1000 * concurrency + n)
            sizing = sizing_of(client, writer)
            own.append(ours(client, concurrency, writer, sizing))
            other.append(vllms(client, written(concurrency, writer, sizing), concurrency, site))
            print(concurrency, *({name: round(value, 2) for name, value in x[-1].items()} for x in (own, other)))
        found[str(concurrency)] = compare(own, other)
    return found


def compare(own: Sequence[Numbers], other: Sequence[Numbers]) -> dict[str, Any]:
    """Medians over the rounds, their difference, and the wider half range of the tools' own rounds (as shares)."""
    lengths = [statistics.fmean(one["prompt_tokens"] for one in rounds) for rounds in (own, other)]
    found: dict[str, Any] = {"prompt_tokens": [round(length, 1) for length in lengths]}
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "output_tok_s"):
        mine, theirs = ([one[name] for one in rounds] for rounds in (own, other))
        middle = statistics.median(theirs)
        difference = statistics.median(mine) / middle - 1
        rounds_differ = max((max(values) - min(values)) / 2 / statistics.median(values) for values in (mine, theirs))
        found[name] = {
            "octoserve": round(statistics.median(mine), 3),
            "vllm_bench": round(middle, 3),
            "difference": round(difference, 4),
            "rounds_differ": round(rounds_differ, 4),
            "within_2_percent": abs(difference) <= BOUND,
        }
    for name in ("generator_busy", "generator_starved"):
        found[name] = round(statistics.median(one[name] for one in own), 4)
    return found


def explained(found: dict[str, Any], by_rounds: bool) -> bool:
    """Whether all numbers of a server agree."""
    return all(
        number["within_2_percent"] or (by_rounds and abs(number["difference"]) <= number["rounds_differ"])
        for streams in found.values()
        for number in streams.values()
        if isinstance(number, dict)
    )


def main() -> int:
    """Measure, compare, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--result", type=Path, default=RESULT)
    options = arguments.parse_args()
    made_by = results.origin(COVERS)
    began = time.monotonic()
    model = deployments.served("tiny_glm")
    name = model.options["served-model-name"]
    healthy = deployments.Mutant("healthy", "control", control=True)
    with deployments.Workshop() as workshop:
        with noisy_server.serve() as url:
            scripted = beside(url, EXACT.name, workshop.site, options.rounds)
        with workshop.deployed(healthy) as url:
            real = beside(url, name, workshop.site, options.rounds)
    agree = explained(scripted, by_rounds=False) and explained(real, by_rounds=True)
    result = {
        "seconds": round(time.monotonic() - began),
        "rounds": options.rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "requests_a_stream": REQUESTS,
        "scripted": scripted,
        "vllm_cpu_tiny_glm": real,
        "agree": agree,
    }
    results.save(options.result, made_by, result)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
