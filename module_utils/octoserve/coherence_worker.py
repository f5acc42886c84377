"""Asks the coherence gate's cases on the host, as a long job: see job.py. Its result is the gate's."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import coherence, job, reference
from .coherence_suite import parse_suite
from .openai_api import Client


def work(spec: dict[str, Any], secrets: dict[str, Any], progress: job.Progress) -> dict[str, Any]:
    """Ask, judge, and record what a first deploy that passed has measured."""
    client = Client(spec["base_url"], spec["model"], secrets["api_key"], spec["request_timeout"])

    def report(text: str, done: int, total: int) -> None:
        progress.phase(text, total, "steps", done)

    try:
        record = Path(spec["record"])
        settings = coherence.Settings(**spec["settings"], recorded=reference.load(record))
        result = coherence.run(client, [parse_suite(suite) for suite in secrets["suites"]], settings, report)
        to_record = result.pop("to_record")
        recorded: list[str] = []
        if result["ok"] and settings.bootstrap:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            recorded = reference.add(record, to_record, time=now, **spec["told"])
    except (ValueError, OSError) as error:
        raise job.WorkerError(str(error)) from error
    return {**result, "recorded": recorded}


if __name__ == "__main__":
    sys.exit(job.main(work))
