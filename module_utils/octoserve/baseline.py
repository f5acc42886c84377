"""What a host reached before with one profile and stack, and whether it is slower now.

Trials inside one start of the service are not independent (clocks, placement, graph capture), so the unit of
comparison is the start: one mean a start. The test is a one-sided prediction interval for one new mean,
``mean - t(1 - alpha, k - 1) * stdev * sqrt(1 + 1/k)`` over k earlier starts (Hahn and Meeker, Statistical
Intervals, 1991, section 4.8): a healthy start falls below it with probability alpha, as far as the means of
starts are normal.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import atomic, student_t

MIN_STARTS = 3
ALPHA = 0.01  # share of healthy starts that raise an alarm


@dataclass(frozen=True)
class Start:
    """One start of the service: the mean decode rate over ``trials`` trials, in tokens per second."""

    start: str
    time: str
    deployment: str
    mean: float
    trials: int


def load(path: Path) -> list[Start]:
    """Read the history, oldest first; empty where there is none. Raises ValueError where it is damaged."""
    try:
        return [Start(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["starts"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: found no history of starts ({error}), wanted what the throughput gate wrote; move the "
            "file away to begin a new history"
        ) from error


def append(path: Path, new: Start) -> list[Start]:
    """Add a start to the history and return it whole. A start measured again is pooled with itself.

    Raises ValueError where the history is damaged, OSError where it cannot be written.
    """
    history = load(path)
    earlier = next((start for start in history if start.start == new.start), None)
    if earlier is None:
        history.append(new)
    else:
        trials = earlier.trials + new.trials
        mean = (earlier.mean * earlier.trials + new.mean * new.trials) / trials
        history[history.index(earlier)] = Start(new.start, new.time, new.deployment, mean, trials)
    path.parent.mkdir(parents=True, exist_ok=True)
    starts = [asdict(start) for start in history]
    atomic.write_text(path, json.dumps({"unit": "decode tok/s", "starts": starts}, indent=1) + "\n")
    return history


def compare(history: Sequence[Start], start: str, mean: float) -> dict[str, Any]:
    """Compare a mean (tok/s) with the earlier starts, without the start itself.

    Returns ``starts`` (how many there are), ``mean``, ``stdev``, ``change`` (of the new mean, a share),
    ``alarm_below`` (tok/s), ``smallest_slowdown`` (the share of the mean at which the alarm goes off), ``alpha``
    and ``regression``. Before three starts the last ones are None and there is no regression.
    """
    means = [earlier.mean for earlier in history if earlier.start != start]
    k = len(means)
    found: dict[str, Any] = {
        "starts": k,
        "mean": statistics.fmean(means) if means else None,
        "stdev": None,
        "change": mean / statistics.fmean(means) - 1 if means else None,
        "alarm_below": None,
        "smallest_slowdown": None,
        "alpha": ALPHA,
        "regression": False,
    }
    if k < MIN_STARTS:
        return found
    stdev = statistics.stdev(means)
    margin = student_t.quantile(1 - ALPHA, k - 1) * stdev * math.sqrt(1 + 1 / k)
    found["stdev"] = stdev
    found["alarm_below"] = found["mean"] - margin
    found["smallest_slowdown"] = margin / found["mean"]
    found["regression"] = mean < found["alarm_below"]
    return found
