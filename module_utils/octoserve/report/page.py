"""The report page: one HTML file that loads nothing. Everything that it shows is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from . import words
from .plots import plots

KINDS = {
    "question": "Questions",
    "needle": "Needles in long prompts",
    "score": "Perplexity and repeatability",
    "agreement": "Streamed and whole answers agree",
}
ORDER = ("fail", "could-not-run", "pass")
STATES = {"pass": words.GOOD, "fail": words.BAD}


def render(
    template: Path,
    summary: Mapping[str, Any],
    measured: Mapping[str, Any],
    cause: Mapping[str, Any] | None,
    started: datetime,
) -> str:
    """The page of one run. ``measured`` is the throughput gate's whole result, ``cause`` the task that broke first."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=words.number, duration=words.duration, plural=words.plural, excerpt=words.excerpt)
    drawn, no_plots = plots(measured)
    return environment.get_template(template.name).render(
        summary=summary,
        measured=measured,
        cause=cause,
        started=started,
        verdict=words.verdict(summary, cause),
        checks=words.checks(summary),
        groups=groups(summary["coherence"]["cases"]),
        case_state=lambda case: STATES.get(case["verdict"], words.UNKNOWN),
        case_measured=words.measured,
        point_name=words.point_name,
        answered=words.answered,
        # Made by this project from numbers and its own words, not from what a server said.
        plots=[(plot, Markup(plot.svg)) for plot in drawn],  # noqa: S704  # plots.py drew it
        no_plots=no_plots,
        baseline_line=words.baseline_line(measured.get("baseline")),
        told_below=told_below(summary),
    )


def groups(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cases by kind as ``title``, ``range`` and ``cases``; in each group those that did not pass come first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        found.setdefault(case["kind"], []).append(case)
    kinds = [*(kind for kind in KINDS if kind in found), *(kind for kind in found if kind not in KINDS)]
    return [
        {
            "title": KINDS.get(kind, kind),
            "range": _range(found[kind]),
            "cases": sorted(found[kind], key=lambda case: ORDER.index(case["verdict"])),
        }
        for kind in kinds
    ]


def _range(cases: Iterable[Mapping[str, Any]]) -> str:
    """What the cases of a group measured, in a few words; empty for questions."""
    found = [case["measured"] or {} for case in cases]
    lengths = [one["prompt_tokens"] for one in found if one.get("prompt_tokens") is not None]
    texts = [words.perplexity(one) for one in found if one.get("perplexity") is not None]
    if lengths:
        return f"up to {words.number(max(lengths), 0)} tokens"
    return f"perplexity {', '.join(texts)}" if texts else ""


def told_below(summary: Mapping[str, Any]) -> bool:
    """Whether the section of the gate that did not hold shows all that the failed task said."""
    if summary["failed_phase"] == "coherence":
        return bool(summary["coherence"]["cases"])
    result = summary["throughput"]
    return bool(summary["failed_phase"] == "throughput" and not result["ok"] and result["verdict"] != "did-not-run")
