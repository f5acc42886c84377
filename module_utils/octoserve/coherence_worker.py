"""Asks the coherence gate's cases on the host, as a long job: see job.py. Its result is the gate's."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import coherence, job, reference, startup
from .coherence_suite import parse_suite
from .openai_api import Client


def work(spec: dict[str, Any], secrets: dict[str, Any], progress: job.Progress) -> dict[str, Any]:
    """Ask, judge, and record what a first deploy that passed has measured.

    Answers of two starts of the service are no reference: then nothing is recorded, and the job fails.
    """
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
            found = startup.unit_state(spec["unit"])
            if (found.invocation, found.active, found.sub) != (spec["start"], "active", "running"):
                raise job.WorkerError(
                    f"could not run: nothing is recorded, for {spec['unit']} ended or was started again while it was "
                    f"asked: found invocation {found.invocation or 'none'}, {found.active} ({found.sub}), wanted "
                    f"{spec['start']}, active (running); see why in its journal, then deploy again"
                )
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            recorded = reference.add(record, to_record, time=now, **spec["told"])
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        raise job.WorkerError(str(error)) from error
    return {**result, "recorded": recorded}


if __name__ == "__main__":
    sys.exit(job.main(work))
