"""Made-up results of both gates, as on a host with 8 cards, for tests and pictures. No machine gave them."""

from __future__ import annotations

import math
import random
from datetime import datetime, timedelta, timezone
from typing import Any

from octoserve import baseline
from octoserve.evidence import Run, Task

STARTED = datetime(2026, 11, 30, 1, 2, 3, tzinfo=timezone.utc)
TOLD = {"stack": "vllm-0.32.0", "profile": "glm5_ud_q4_k_xl", "deployment": "0007"}
NOTE = "Made-up numbers: no machine gave them."


def case(name: str, verdict: str = "pass", kind: str = "question", **changed: Any) -> dict[str, Any]:
    """One case of the coherence gate."""
    usual = {
        "name": name,
        "kind": kind,
        "verdict": verdict,
        "prompt": f"{NOTE} What is <b>the</b> capital of France?",
        "answer": "The capital of France is Paris.",
        "reasoning": "",
        "tool_calls": [],
        "reason": "" if verdict == "pass" else f"{name} is {verdict}",
        "seconds": 0.41,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 13, "completion_tokens": 8},
        "private": False,
        "measured": None,
    }
    return {**usual, **changed}


def private(name: str, verdict: str = "pass") -> dict[str, Any]:
    """One case as the module returns it where the user marked it private."""
    hidden = "(private)"
    reason = "" if verdict == "pass" else "an expectation did not hold"
    return case(name, verdict, prompt=hidden, answer=hidden, reasoning=hidden, private=True, reason=reason)


def score(name: str, perplexity: float = 6.31, limit: float | None = 6.6) -> dict[str, Any]:
    """A fixed text scored by the model."""
    over = limit is not None and perplexity > limit
    measured = {
        "perplexity": perplexity,
        "limit": limit,
        "tokens": 512,
        "drift": {"mean": 0.0021, "max": 0.034},
        "drift_bound": {"mean": 0.1, "max": 2.0},
        "again": {"mean": 0.0, "max": 0.0},
        "under_load": {"mean": 0.0011, "max": 0.019},
        "bound": {"mean": 0.01, "max": 0.2},
    }
    reason = f"perplexity {perplexity}, the limit of the profile is {limit}" if over else ""
    verdict = "fail" if over else "pass"
    prompt = "The steam engine changed where people worked and lived ..."
    return case(name, verdict, "score", prompt=prompt, answer="", measured=measured, reason=reason, usage=None)


def needle(length: int, depth: float, verdict: str = "pass") -> dict[str, Any]:
    """A fact hidden in a long prompt."""
    return case(
        f"needle-{length}-at-{depth:.0%}",
        verdict,
        "needle",
        prompt=f"[{length} tokens of prose] ... What is the number of the locker?",
        answer="The number of the locker is 7194.",
        measured={"prompt_tokens": length, "depth": depth},
        usage={"prompt_tokens": length, "completion_tokens": 11},
        seconds=length / 9000,
    )


def coherence(*cases: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The result of the coherence gate; without cases a healthy one of every kind."""
    cases = cases or (
        case("capital-of-france"),
        case("count-to-50", prompt="Count from 1 to 50, writing each number on a new line.", answer="1\n2\n3\n..."),
        case(
            "essay",
            prompt="Write an essay on the steam engine.",
            answer="Steam changed everything. " * 60,
            seconds=31.2,
        ),
        private("in-house-terms"),
        case(
            "weather-tool",
            answer="",
            tool_calls=[{"name": "weather", "arguments": {"city": "Oslo"}}],
            reasoning="The user wants the weather, so I call the tool.",
        ),
        case("capital-of-france-agrees", kind="agreement"),
        *(needle(length, depth) for length in (8192, 32768) for depth in (0.1, 0.5, 0.9)),
        score("prose"),
        score("code", 3.02, 3.2),
    )
    passed = sum(one["verdict"] == "pass" for one in cases)
    usual = {
        "ok": passed == len(cases),
        "passed": passed,
        "total": len(cases),
        "seconds": 74.2,
        "suites": ["default"],
        "bootstrap": False,
        "cases": list(cases),
        "left_out": [{"name": "reasoning-apart", "reason": "the profile names no reasoning parser"}],
    }
    return {**usual, **changed}


def throughput(verdict: str = "pass", starts: int = 9, ok: bool | None = None, slowdown: float = 0.0) -> dict[str, Any]:
    """The result of the throughput gate with everything that it can hold."""
    chance = random.Random(4)
    mean = 56.9 * (1 - slowdown)
    trials = [_trial(mean * (1 + chance.gauss(0, 0.004))) for _ in range(5)]
    history = [_start(number, 57.0 * (1 + chance.gauss(0, 0.01))) for number in range(starts)]
    compared = baseline.compare([baseline.Start(**entry) for entry in history], "now", mean)
    reasons = {
        "pass": "",
        "fail": f"{mean:.2f} tok/s, the floor of the profile is 60",
        "regression": f"{mean:.2f} tok/s, {slowdown:.1%} slower than the mean of {starts} earlier starts",
    }
    return {
        "ok": verdict == "pass" if ok is None else ok,
        "verdict": verdict,
        "reason": reasons[verdict],
        "decode_tok_s": {"mean": mean, "stdev": 0.3, "ci95": [mean - 0.4, mean + 0.4], "n": 5},
        "steady_tok_s": {"mean": mean, "stderr": 0.1},
        "ttft_ms": 183.0,
        "end_to_end_tok_s": mean * 0.93,
        "details": {},
        "completion_tokens": 100,
        "trials": trials,
        "warmup": [{**_trial(mean * 0.71), "ttft_s": 2.4}],
        "itl_ms": _gaps(chance, 1000 / mean),
        "points": [_point("mix", 4, 0, mean)]
        + [_point("concurrency", count, 0, mean) for count in (1, 4, 16, 32)]
        + [_point("context", 1, length, mean) for length in (0, 8192, 32768)],
        "generator": {"busy": 0.31, "ceiling_events_s": 21400.0, "bottleneck": False},
        "gpus": [_card(index, chance) for index in range(8)],
        "baseline": {"detectable_slowdown": 0.043 if starts >= 3 else None, **compared, "history": history},
        "kept": False,
    }


def _trial(rate: float) -> dict[str, Any]:
    seconds = 0.183 + 99 / rate
    return {
        "completion_tokens": 100,
        "events": 100,
        "ttft_s": 0.183,
        "total_s": seconds,
        "decode_tok_s": rate,
        "end_to_end_tok_s": 100 / seconds,
    }


def _start(number: int, mean: float) -> dict[str, Any]:
    time = STARTED - timedelta(days=40 - 3 * number)
    return {
        "start": f"start-{number}",
        "time": time.isoformat(),
        "deployment": f"{1 + number // 2:04d}",
        "mean": mean,
        "trials": 5,
    }


def _gaps(chance: random.Random, usual: float) -> dict[str, Any]:
    gaps = sorted(usual * (1 + chance.gauss(0, 0.08)) + (8 if chance.random() < 0.02 else 0) for _ in range(495))
    edges = [usual * 0.7 * 1.06**step for step in range(16)]
    counts = [sum(low < gap <= high for gap in gaps) for low, high in zip([0.0, *edges], [*edges, math.inf])]
    quantile = {f"p{share}": gaps[int(len(gaps) * share / 100)] for share in (50, 95, 99)}
    return {
        **quantile,
        "max": gaps[-1],
        "n": len(gaps),
        "histogram": [[edge, count] for edge, count in zip([*edges, gaps[-1]], counts)],
    }


def _point(sweep: str, streams: int, context: int, rate: float) -> dict[str, Any]:
    each = rate / (1 + 0.045 * (streams - 1)) / (1 + context / 90000)
    wait = 183 * (1 + 0.06 * streams) + context / 9
    return {
        "sweep": sweep,
        "concurrency": streams,
        "context_tokens": context,
        "prompt_tokens": float(context or 21),
        "requests": 2 * streams + 2,
        "failed": 0,
        "seconds": 14.0,
        "output_tok_s": each * streams * 0.94,
        "decode_tok_s": each,
        "end_to_end_tok_s": each * 0.94 * 4000 / (4000 + wait),
        "ttft_ms": {"p50": wait, "p95": 1.4 * wait, "p99": 1.7 * wait},
        "itl_ms": {"p50": 1000 / each, "p95": 1150 / each, "p99": 1600 / each},
        "reason": "",
    }


def _card(index: int, chance: random.Random) -> dict[str, Any]:
    hot = 61 + 2 * index
    return {
        "index": index,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "sm_clock_mhz": {"min": 2310, "mean": 2377.5 + chance.random(), "max": 2430},
        "memory_clock_mhz": {"min": 12481, "mean": 12481.0, "max": 12481},
        "temperature_c": {"min": hot - 6, "mean": hot - 2.2, "max": hot},
        "power_w": {"min": 201.0, "mean": 288.4, "max": 341.2},
        "throttle_reasons": ["sw_power_cap"] if index == 7 else [],
    }


def task(phase: str, action: str = "command", status: str = "ok", message: str = "", seconds: float = 1.0) -> Task:
    """A finished task."""
    return Task(phase, f"{action} of {phase}", action, status, seconds, message)


def run(*tasks: tuple[Task, dict[str, Any]], failed: bool = False) -> Run:
    """A run of these tasks."""
    made = Run("gpu8", STARTED, failed=failed, inventory="inventory/mine")
    for done, result in tasks:
        made.record(done, result)
        made.seconds[done.phase] += done.seconds
    return made


def deployed() -> list[tuple[Task, dict[str, Any]]]:
    """The chapters before the gates, as on a first deploy."""
    return [
        (task("preflight", "set_fact", seconds=31.0), {"ansible_facts": {"octoserve_evidence": TOLD}}),
        (task("release", status="changed", seconds=212.0), {"changed": True}),
        (task("model", status="changed", seconds=1893.0), {"changed": True}),
        (task("service", status="changed", seconds=344.0), {"changed": True}),
    ]


def runs() -> dict[str, Run]:
    """What a report may have to show, by name."""
    broke: tuple[Task, dict[str, Any]] = (task("gates", "assert", "failed", "the gate did not hold"), {})
    right = (task("gates", "coherence_gate", seconds=74.2), coherence())
    wrong = coherence(
        case("capital-of-france", "fail", answer="The capital of France is Lyon.", reason='"Paris" is not said'),
        case("count-to-50", "fail", answer="1\n2\n4\n8\n", reason="line 3 is 4, wanted 3"),
        case("arithmetic"),
        private("in-house-terms", "fail"),
        needle(8192, 0.5, "fail"),
        needle(32768, 0.5),
        score("prose", 14.8),
        case("agrees", "could-not-run", "agreement", answer="", reason="POST /v1/chat/completions: 500", usage=None),
    )
    silent = coherence(
        *(
            case(name, "could-not-run", answer="", usage=None, reason="connection refused by http://127.0.0.1:8000")
            for name in ("capital-of-france", "count-to-50", "essay")
        )
    )
    locked_out = coherence(
        case(
            "essay",
            "could-not-run",
            answer="",
            usage=None,
            reason="http://127.0.0.1:8000/v1: HTTP 401 Unauthorized (check octoserve_api_key)",
        ),
        case("ours", "could-not-run", answer="", usage=None, reason="no answer (private)", private=True),
    )
    unlimited = {
        **score("prose", 6.31, None),
        "verdict": "could-not-run",
        "reason": "no limit for a perplexity of 6.31",
    }
    stopped = task(
        "service",
        "service_ready",
        "failed",
        "octoserve-main.service ended after 41 s with exit status 1, wanted an answer within 3600 s; its journal:\n"
        "  torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.31 GiB (GPU 3; 94.97 GiB total)\n"
        "Lower serve.gpu.memory_utilization in the profile, or free the card.",
        41.0,
    )
    measured = "throughput_gate"
    return {
        "passed": run(*deployed(), right, (task("gates", measured, "changed", seconds=181.0), throughput())),
        "first": run(
            *deployed(),
            (task("gates", "coherence_gate", seconds=74.2), coherence(score("prose", 6.31, None), recorded=["prose"])),
            (task("gates", measured, "changed", seconds=181.0), throughput(starts=0)),
        ),
        "wrong": run(*deployed(), (task("gates", "coherence_gate", seconds=12.0), wrong), broke, failed=True),
        "silent": run(*deployed(), (task("gates", "coherence_gate", seconds=2.0), silent), broke, failed=True),
        "locked out": run(*deployed(), (task("gates", "coherence_gate"), locked_out), broke, failed=True),
        "unlimited": run(
            *deployed(), (task("gates", "coherence_gate"), coherence(case("sum"), unlimited)), broke, failed=True
        ),
        "stopped": run(*deployed()[:3], (stopped, {}), failed=True),
        "slower": run(
            *deployed(), right, (task("gates", measured), throughput("regression", slowdown=0.051)), broke, failed=True
        ),
        "warned": run(*deployed(), right, (task("gates", measured), throughput("regression", ok=True, slowdown=0.051))),
        "slow": run(
            *deployed(), right, (task("gates", measured), throughput("fail", slowdown=0.3)), broke, failed=True
        ),
    }
