"""A short text about a run for a CI job's summary (GitHub flavoured Markdown), fit to be read as it is, too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import words

SHOWN_CASES = 20
SIGNS = {words.GOOD: "✅", words.WARNING: "⚠️", words.BAD: "❌", words.UNKNOWN: "❔"}
MARKUP = re.compile(r"([\\`*_\[\]<>|#])")


def markdown(summary: Mapping[str, Any], cause: Mapping[str, Any] | None) -> str:
    """Verdict, phases, failed cases with their reasons, numbers."""
    found = words.verdict(summary, cause)
    where = f"{summary['profile'] or 'no profile'} on {summary['host']}"
    if summary["stack"]:
        where += f", {summary['stack']}"
    if summary["deployment"]:
        where += f", deployment {summary['deployment']}"
    lines = [f"## {SIGNS[found.state]} {plain(found.headline)}", "", plain(where), "", plain(found.sentence)]
    lines += ["", plain(found.next_step)]
    if found.command:
        lines += ["", "```", found.command, "```"]
    lines.append("")
    lines += [f"- {SIGNS[check.state]} {check.name}: {plain(check.text)}" for check in words.checks(summary)]
    if line := words.baseline_line(summary["throughput"].get("baseline")):
        lines.append(f"- {plain(line)}")
    lines += _phases(summary["phases"]) + _cases(summary["coherence"]) + _points(summary["throughput"])
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Text on one line whose characters mean nothing to Markdown."""
    return MARKUP.sub(r"\\\1", " ".join(text.split()))


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The first column to the left, numbers to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(map(plain, row))} |" for row in rows]
    return ["", f"### {title}", "", *lines]


def _phases(phases: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [(phase["name"], words.duration(phase["seconds"]), str(phase["changed"])) for phase in phases]
    return _table("Phases", ("phase", "time", "changed"), rows) if rows else []


def _cases(coherence: Mapping[str, Any]) -> list[str]:
    bad = [case for case in coherence["cases"] if case["verdict"] != "pass"]
    if not bad:
        return []
    lines = ["", "### Cases that did not pass", ""]
    lines += [f"- **{plain(case['name'])}** ({case['verdict']}): {plain(case['reason'])}" for case in bad[:SHOWN_CASES]]
    if len(bad) > SHOWN_CASES:
        lines.append(f"- and {len(bad) - SHOWN_CASES} more, in report.html")
    return lines


def _points(result: Mapping[str, Any]) -> list[str]:
    points = [point for point in result.get("points") or [] if point["requests"]]
    rows = [
        (
            words.point_name(point),
            words.number(point["output_tok_s"]),
            words.number(point["decode_tok_s"]),
            words.number((point["ttft_ms"] or {}).get("p50"), 0),
            words.number((point["itl_ms"] or {}).get("p99")),
        )
        for point in points
    ]
    head = ("load", "tok/s in all", "tok/s each", "TTFT p50 ms", "inter-token p99 ms")
    return _table("Under load", head, rows) if rows else []
