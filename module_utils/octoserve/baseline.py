"""What a host reached before with one profile and stack, and whether it is slower now.

Trials inside one start of the service are not independent (clocks, placement, graph capture), so the unit of
comparison is the start: one steady rate (see trial.steady_rate) a start. The test is a one-sided prediction interval
for one new mean over k earlier starts (Hahn and Meeker, Statistical Intervals, 1991, section 4.8),
``mean - t(1 - alpha, freedom) * stdev * sqrt(1 + 1/k)``: a healthy start falls below it with probability alpha.

With k starts alone, ``freedom`` is k - 1, and after 5 starts the margin is over 4 %: of slowdowns of 5 % three in ten
would be missed. So the variance is moderated as in Smyth (Statistical Applications in Genetics and Molecular Biology
3(1), 2004, section 3): what starts of one host usually differ by (``PRIOR_STDEV``, and the standard error that the
trials leave) counts like ``PRIOR_FREEDOM`` further starts.

Assumed is that starts of a healthy host differ by 1 %. Where a history is too wide for that (chi-squared test at
``PRIOR_ALPHA``), it stands alone, as in the formula without the prior. A host between the two has more false alarms
than ALPHA until its history is long enough to show it; docs/throughput.md has the numbers.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import atomic, chi_squared, student_t

MIN_STARTS = 3
#: Share of healthy starts that raise an alarm. At most 1 % is promised; measured shares scatter by 0.2 % around this.
ALPHA = 0.0085
PRIOR_STDEV = 0.01  # of the mean, between starts of one host
PRIOR_FREEDOM = 30
PRIOR_ALPHA = 0.001
CAUGHT = 1.6449  # quantile 0.95 of the normal distribution: the share of slow starts that are caught


@dataclass(frozen=True)
class Start:
    """One start of the service: its steady decode rate over ``trials`` trials in tokens per second.

    ``stderr``: what the trials leave open, None where it is not known. A ``regression`` is kept to be seen, but not
    compared with, or the baseline would follow the slowdown.
    """

    start: str
    time: str
    deployment: str
    mean: float
    trials: int
    stderr: float | None = None
    regression: bool = False


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
        history[history.index(earlier)] = _pooled(earlier, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    starts = [asdict(start) for start in history]
    atomic.write_text(path, json.dumps({"unit": "decode tok/s", "starts": starts}, indent=1) + "\n")
    return history


def compare(history: Sequence[Start], start: str, mean: float) -> dict[str, Any]:
    """Compare a steady rate (tok/s) with the earlier starts, without the start itself.

    Returns ``starts`` (how many there are), ``mean``, ``stdev``, ``change`` (of the new mean, a share),
    ``alarm_below`` (tok/s), ``smallest_slowdown`` (the share of the mean at which the alarm goes off),
    ``detectable_slowdown`` (the share that is caught with 95 %), ``alpha``, ``wider`` (whether the starts differ by
    more than assumed) and ``regression``. Before three starts those on the alarm are None, and there is none.
    """
    earlier = [other for other in history if other.start != start and not other.regression]
    means = [other.mean for other in earlier]
    k = len(means)
    found: dict[str, Any] = {
        "starts": k,
        "mean": statistics.fmean(means) if means else None,
        "stdev": statistics.stdev(means) if k > 1 else None,
        "change": mean / statistics.fmean(means) - 1 if means else None,
        "alarm_below": None,
        "smallest_slowdown": None,
        "detectable_slowdown": None,
        "alpha": ALPHA,
        "wider": False,
        "regression": False,
    }
    if k < MIN_STARTS:
        return found
    known = [other.stderr for other in earlier if other.stderr is not None]
    trials = statistics.fmean(stderr**2 for stderr in known) if known else 0.0
    prior = (PRIOR_STDEV * found["mean"]) ** 2 + trials
    squares, freedom = (k - 1) * found["stdev"] ** 2, k - 1
    found["wider"] = chi_squared.exceeds(squares / prior, freedom) < PRIOR_ALPHA
    if not found["wider"]:
        squares, freedom = squares + PRIOR_FREEDOM * prior, freedom + PRIOR_FREEDOM
    spread = math.sqrt(squares / freedom * (1 + 1 / k))
    margin = student_t.quantile(1 - ALPHA, freedom) * spread
    found["alarm_below"] = found["mean"] - margin
    found["smallest_slowdown"] = margin / found["mean"]
    found["detectable_slowdown"] = (margin + CAUGHT * spread) / found["mean"]
    found["regression"] = mean < found["alarm_below"]
    return found


def _pooled(earlier: Start, new: Start) -> Start:
    """Two measurements of one start as one; where one of them was a regression, no later start is held to it."""
    trials = earlier.trials + new.trials
    mean = (earlier.mean * earlier.trials + new.mean * new.trials) / trials
    stderr = None
    if earlier.stderr is not None and new.stderr is not None:
        stderr = math.hypot(earlier.stderr * earlier.trials, new.stderr * new.trials) / trials
    return Start(new.start, new.time, new.deployment, mean, trials, stderr, earlier.regression or new.regression)
