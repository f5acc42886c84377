"""Percentiles and histogram of latencies. The host has no numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BINS_PER_DECADE = 20


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of sorted values lies, linear between neighbours as numpy's default is."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """``p50``, ``p95``, ``p99`` in milliseconds; None where there is no value."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {name: 1000 * percentile(ordered, share) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}


def describe_ms(seconds: Sequence[float]) -> dict[str, Any]:
    """Percentiles, ``max``, ``n`` and ``histogram``: ``[upper edge in ms, count]``, twenty bins a decade."""
    counts: dict[int, int] = {}
    for value in seconds:
        # Two reads of one moment differ by less than the shortest bin shows.
        edge = math.ceil(BINS_PER_DECADE * math.log10(max(1000 * value, 0.1)))
        counts[edge] = counts.get(edge, 0) + 1
    histogram = [
        [round(10 ** (edge / BINS_PER_DECADE), 4), counts.get(edge, 0)]
        for edge in (range(min(counts), max(counts) + 1) if counts else ())
    ]
    found: dict[str, Any] = dict.fromkeys(("p50", "p95", "p99"))
    return {
        **found,
        **(percentiles_ms(seconds) or {}),
        "max": 1000 * max(seconds) if seconds else None,
        "n": len(seconds),
        "histogram": histogram,
    }
