"""Student's t distribution for whole degrees of freedom, and the summary of a sample. The host has no scipy."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any


def two_sided_probability(t: float, freedom: int) -> float:
    """P(abs(T) <= t) for T with ``freedom`` degrees of freedom.

    Finite series of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    theta = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 if odd else 1, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    if odd:
        return 2 / math.pi * (theta + sine * total)
    return sine * total


@functools.cache
def quantile(probability: float, freedom: int) -> float:
    """The t that T with ``freedom`` degrees of freedom stays below with ``probability`` (0.5 < p < 1)."""
    if freedom < 1 or not 0.5 < probability < 1:
        raise ValueError(f"no quantile {probability} of t with {freedom} degrees of freedom")
    low, high = 0.0, 1.0
    while (1 + two_sided_probability(high, freedom)) / 2 < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if (1 + two_sided_probability(middle, freedom)) / 2 < probability:
            low = middle
        else:
            high = middle
    return high


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """``mean``, ``stdev``, ``ci95`` (ends of the 95 % confidence interval of the mean) and ``n``.

    With one value there is no spread: ``stdev`` and ``ci95`` are None.
    """
    n = len(values)
    mean = statistics.fmean(values)
    if n == 1:
        return {"mean": mean, "stdev": None, "ci95": None, "n": 1}
    stdev = statistics.stdev(values)
    half = quantile(0.975, n - 1) * stdev / math.sqrt(n)
    return {"mean": mean, "stdev": stdev, "ci95": [mean - half, mean + half], "n": n}
