"""The long job that measures; see job.py for the protocol and throughput.py for the work."""

from __future__ import annotations

import datetime
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import baseline, gpu_clocks, job, sweep_plan, throughput
from .openai_api import Client


def work(spec: dict[str, Any], secrets: dict[str, Any], progress: job.Progress) -> dict[str, Any]:
    """Measure what the spec describes. The start is added to the baseline here, once for each measurement."""
    path, start = Path(spec["baseline"]), spec["start"]
    client = Client(spec["base_url"], spec["model"], secrets["api_key"], spec["request_timeout"])
    request = throughput.Request(
        spec["prompt"], spec["max_tokens"], spec["trials"], spec["warmup"], spec["request_options"]
    )
    limits = throughput.Limits(spec["floor_tok_s"], spec["expected_tokens"] or None, spec["on_regression"] == "fail")
    progress.phase("throughput: warming up")
    try:
        history = baseline.load(path)
        with gpu_clocks.Sampler() as sampler:
            result = throughput.gate(
                client,
                request,
                limits,
                lambda mean: baseline.compare(history, start, mean),
                settings=sweep_plan.parse(spec["sweeps"]),
                max_num_seqs=spec["max_num_seqs"] or None,
                report=lambda name, done, total, unit: progress.phase(f"throughput: {name}", total, unit, done),
            )
        result.update(gpus=sampler.gpus, gpus_reason=sampler.reason)
        # A start that the generator held back would make the next healthy one look fast, and a slow one healthy.
        spoiled = bool(result["generator"] and result["generator"]["bottleneck"])
        kept = result["verdict"] in (throughput.PASSED, throughput.REGRESSION) and not spoiled
        if kept:
            history = baseline.append(path, _start(spec, result))
    except (ValueError, OSError) as error:
        raise job.WorkerError(f"the baseline cannot be kept: {error}") from error
    if result["baseline"] is not None:
        result["baseline"]["history"] = [asdict(entry) for entry in history]
    return {**result, "kept": kept}


def _start(spec: dict[str, Any], result: dict[str, Any]) -> baseline.Start:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    steady = result["steady_tok_s"]
    return baseline.Start(
        spec["start"],
        now,
        spec["deployment"],
        steady["mean"],
        len(result["trials"]),
        steady["stderr"],
        result["verdict"] == throughput.REGRESSION,
    )


if __name__ == "__main__":
    sys.exit(job.main(work))
