#!/usr/bin/env python3
"""How often the throughput gate alarms, healthy and 5 % slower: part of `make test-gates`.

    PYTHONPATH=module_utils python -m tests.gates.throughput_power [--healthy N] [--slow N] [--streams N]

Every start is the gate's own code on real sockets against the scripted server of noisy_server.py: tokens at about 57
a second whose times vary by 10 %, stalls of 200 ms in a fifth of the trials, starts that differ by 1 %: their rates are
the quantiles of a normal distribution, so that no luck of the draw is left. Many starts run side by side, since they
mostly wait. Then each start is judged by histories that are drawn from the other healthy
starts, with the gate's own test. Also measured: what the load generator can read.

A long suite (20 minutes on two cores); writes tests/gates/throughput_power.json. Ends 0 only where at most 1 % of the
healthy starts and at least 95 % of the slow ones raise the alarm, for every length of history.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octoserve import baseline, latency, load, student_t, throughput, trial
from octoserve.baseline import Start
from octoserve.openai_api import Client

from tests import results
from tests.gates import noisy_server
from tests.gates.noisy_server import EXACT, Noise

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_suffix(".json")
COVERS = [
    *(f"module_utils/octoserve/{name}.py" for name in ("baseline", "chi_squared", "load", "openai_api", "student_t")),
    *(f"module_utils/octoserve/{name}.py" for name in ("throughput", "trial")),
    "tests/gates/noisy_server.py",
    "tests/gates/throughput_power.py",
]
TRIALS = 20
SLOWDOWN = 0.05
MOST_ALARMS, LEAST_CAUGHT = 0.01, 0.95
EARLIER = (3, 5, 10, 20)
HISTORIES = 200  # drawn for each start that is judged
RESAMPLES = 2000
PROCESSES = 2
SEED = 20261130
RATE, START_SD = 57.0, 0.01
WITHIN = 0.003  # what 20 trials of 100 tokens leave of a CV of 10 %


def starts_of(count: int, slowdown: float = 0.0) -> list[Noise]:
    """So many starts of one host, in random order."""
    rate = RATE * (1 - slowdown)
    host = statistics.NormalDist(rate, START_SD * rate)
    starts = [Noise(rate=host.inv_cdf((n + 0.5) / count)) for n in range(count)]
    return random.Random(SEED + count).sample(starts, count)


def measure_start(url: str, noise: Noise) -> dict[str, Any]:
    """The gate's result on one start of the server, as far as it is needed here."""
    request, limits = throughput.Request(trials=TRIALS, warmup=1), throughput.Limits(1, 100)
    nothing = baseline.compare([], "", 1.0)
    found = throughput.gate(Client(url, noise.name), request, limits, lambda mean: nothing)
    if found["verdict"] != throughput.PASSED:
        raise RuntimeError(found["reason"])
    return {
        "steady": found["steady_tok_s"]["mean"],
        "stderr": found["steady_tok_s"]["stderr"],
        "plain": found["decode_tok_s"]["mean"],
        "generator": found["generator"],
    }


def measure_side_by_side(job: tuple[str, Sequence[Noise], int, int]) -> list[dict[str, Any]]:
    """One process's share of the starts, so many at the same time."""
    url, starts, streams, number = job

    def one(place: tuple[int, Noise]) -> dict[str, Any]:
        if place[0] < streams:
            time.sleep(place[0] * 2.0 / streams)  # or all would ask in step
        found = measure_start(url, place[1])
        if place[0] % 50 == 0:
            print(f"process {number}: start {place[0]} of {len(starts)}: {found['steady']:.2f} tok/s", flush=True)
        return found

    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(one, enumerate(starts)))


def measure_starts(starts: Sequence[Noise], streams: int) -> list[dict[str, Any]]:
    """All starts, in their order."""
    with noisy_server.serve() as url, ProcessPoolExecutor(PROCESSES) as pool:
        shares = [(url, starts[n::PROCESSES], streams // PROCESSES, n) for n in range(PROCESSES)]
        found = list(pool.map(measure_side_by_side, shares))
    return [found[n % PROCESSES][n // PROCESSES] for n in range(len(starts))]


Test = Callable[[Sequence[Start], Start], bool]


def gates_test(history: Sequence[Start], today: Start) -> bool:
    """The gate's own."""
    return bool(baseline.compare(history, today.start, today.mean)["regression"])


def plain_test(history: Sequence[Start], today: Start) -> bool:
    """The prediction interval from the history alone, for comparison."""
    means = [start.mean for start in history]
    margin = student_t.quantile(1 - baseline.ALPHA, len(means) - 1) * statistics.stdev(means)
    return bool(today.mean < statistics.fmean(means) - margin * (1 + 1 / len(means)) ** 0.5)


def alarms(todays: Sequence[Start], healthy: Sequence[Start], earlier: int, test: Test) -> dict[str, Any]:
    """Share of starts that raise the alarm, over histories of other healthy starts, with its 95 % interval.

    The interval resamples the starts that are judged (Efron's percentile bootstrap): decisions on one start over
    many histories are not independent.
    """
    chosen = random.Random(SEED + earlier)
    shares = []
    for today in todays:
        raised = 0
        for _ in range(HISTORIES):
            history = chosen.sample(healthy, earlier + 1)
            raised += test([start for start in history if start is not today][:earlier], today)
        shares.append(raised / HISTORIES)
    resampled = sorted(statistics.fmean(chosen.choices(shares, k=len(shares))) for _ in range(RESAMPLES))
    ends = [latency.percentile(resampled, share) for share in (0.025, 0.975)]
    return {"share": round(statistics.fmean(shares), 5), "ci95": [round(end, 5) for end in ends], "starts": len(shares)}


def as_starts(found: Sequence[dict[str, Any]], value: str, name: str) -> list[Start]:
    """Results as entries of a history."""
    return [Start(f"{name}{n}", "", "", one[value], TRIALS, one["stderr"]) for n, one in enumerate(found)]


def table(healthy: Sequence[dict[str, Any]], slow: Sequence[dict[str, Any]], value: str, test: Test) -> dict[str, Any]:
    """False alarms and power by the number of earlier starts."""
    well, ill = as_starts(healthy, value, "healthy"), as_starts(slow, value, "slow")
    return {
        str(earlier): {
            "false_alarms": alarms(well, well, earlier, test),
            "caught": alarms(ill, well, earlier, test),
        }
        for earlier in EARLIER
    }


def hosts_that_vary(hosts: int = 1500) -> dict[str, dict[str, float]]:
    """False alarms by how much the starts of a host really differ, simulated start after start as the gate keeps."""
    chosen = random.Random(SEED)
    ages = ((3, 5), (5, 10), (10, 20), (20, 40))
    found = {}
    for sd in (0.005, 0.01, 0.015, 0.02, 0.03):
        raised: dict[tuple[int, int], list[bool]] = {age: [] for age in ages}
        for _ in range(hosts):
            history: list[Start] = []
            for n in range(ages[-1][1]):
                rate = RATE * chosen.gauss(1, sd) * chosen.gauss(1, WITHIN)
                alarm = gates_test(history, Start("now", "", "", rate, TRIALS))
                history.append(Start(str(n), "", "", rate, TRIALS, RATE * WITHIN, alarm))
                for age in ages:
                    if age[0] <= n < age[1]:
                        raised[age].append(alarm)
        found[f"{sd:.1%}"] = {
            f"{low} to {high - 1}": round(statistics.fmean(raised[low, high]), 4) for low, high in ages
        }
    return found


def spread(found: Sequence[dict[str, Any]], value: str) -> dict[str, float]:
    """Mean and relative standard deviation of the starts."""
    values = [one[value] for one in found]
    mean = statistics.fmean(values)
    return {"mean": round(mean, 3), "sd": round(statistics.stdev(values) / mean, 5)}


def generators_limit() -> dict[str, Any]:
    """What the load generator reads: ever more paced streams, then some as fast as it can."""
    steps = []
    with noisy_server.serve() as url:
        for streams in (32, 64, 128, 192, 256):
            done = load.run(Client(url, EXACT.name), [load.Prompt("go", 200)] * streams, streams)
            # The rate of a stream that began in a burst says nothing, here as in a sweep's point.
            even = [a for a in done.answers if not trial.burst_events(trial.event_times(a.chunks))]
            rates = [trial.measure(answer.chunks).decode_tok_s for answer in even]
            waits = [wait for answer in done.answers for wait in trial.gaps(answer.chunks)]
            steps.append({
                "streams": streams,
                **_load(done.cost),
                "seconds": round(done.cost.seconds, 2),
                "bursts": len(done.answers) - len(even),
                "decode_tok_s": round(statistics.fmean(rates), 3) if rates else None,
                "itl_ms": latency.percentiles_ms(waits),
            })  # fmt: skip
        done = load.run(Client(url, Noise(rate=0, ttft_s=0).name), [load.Prompt("go", 20000)] * 8, 8)
    return {"paced_at_57_tok_s": steps, "unpaced": _load(done.cost)}


def _load(cost: load.Cost) -> dict[str, Any]:
    return {
        "events_s": round(cost.events / cost.seconds),
        "busy": round(cost.busy, 3),
        "starved": round(cost.starved, 3),
        "ceiling_events_s": round(cost.ceiling or 0),
        "bottleneck": cost.bottleneck,
    }


def main() -> int:
    """Measure, judge, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--healthy", type=int, default=600)
    arguments.add_argument("--slow", type=int, default=400)
    arguments.add_argument("--streams", type=int, default=60, help="starts side by side")
    arguments.add_argument("--result", type=Path, default=RESULT)
    options = arguments.parse_args()
    made_by = results.origin(COVERS)
    began = time.monotonic()
    limit = generators_limit()
    starts = starts_of(options.healthy) + starts_of(options.slow, SLOWDOWN)
    order = random.Random(SEED).sample(range(len(starts)), len(starts))  # both kinds meet the same disturbances
    measured = dict(zip(order, measure_starts([starts[n] for n in order], options.streams)))
    found = [measured[n] for n in range(len(starts))]
    healthy, slow = found[: options.healthy], found[options.healthy :]
    chosen = table(healthy, slow, "steady", gates_test)
    held = all(
        row["false_alarms"]["share"] <= MOST_ALARMS and row["caught"]["share"] >= LEAST_CAUGHT
        for row in chosen.values()
    )
    result = {
        "seconds": round(time.monotonic() - began),
        "server": {**vars(Noise()), "start_sd": START_SD},
        "slowdown": SLOWDOWN,
        "trials": TRIALS,
        "side_by_side": options.streams,
        "generator": {
            "busy": round(max(one["generator"]["busy"] for one in found), 3),
            "starved": round(max(one["generator"]["starved"] for one in found), 3),
            "bottleneck": sum(one["generator"]["bottleneck"] for one in found),
        },
        "generators_limit": limit,
        "healthy": {name: spread(healthy, name) for name in ("steady", "plain")},
        "slow": {name: spread(slow, name) for name in ("steady", "plain")},
        "earlier_starts": chosen,
        "for_comparison": {
            "history alone, steady rate": table(healthy, slow, "steady", plain_test),
            "history alone, mean of the trials": table(healthy, slow, "plain", plain_test),
        },
        "false_alarms_of_hosts_that_vary_by": hosts_that_vary(),
        "held": held,
        "steady_tok_s": {
            name: " ".join(f"{one['steady']:.3f}" for one in some)
            for name, some in (("healthy", healthy), ("slow", slow))
        },
    }
    results.save(options.result, made_by, result)
    for earlier, row in chosen.items():
        print(f"{earlier} earlier starts: false alarms {row['false_alarms']}, caught {row['caught']}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
