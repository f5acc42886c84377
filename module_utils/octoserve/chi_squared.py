"""The upper tail of the chi-squared distribution for whole degrees of freedom. The host has no scipy."""

from __future__ import annotations

import math


def exceeds(value: float, freedom: int) -> float:
    """P(X > value) for X with ``freedom`` degrees of freedom.

    Finite series of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.4.4 and 26.4.5.
    """
    if value <= 0:
        return 1.0
    root = math.sqrt(value)
    odd = freedom % 2 == 1
    density = math.exp(-value / 2) / math.sqrt(2 * math.pi)
    total, term = 0.0, root if odd else 1.0
    for r in range(1, (freedom - 1) // 2 + 1):
        if odd:
            total += term
            term *= value / (2 * r + 1)
        else:
            term *= value / (2 * r)
            total += term
    tail = (
        math.erfc(root / math.sqrt(2)) + 2 * density * total if odd else math.sqrt(2 * math.pi) * density * (1 + total)
    )
    return tail if math.isfinite(tail) else 0.0  # the terms overflow only where the tail is nothing
