"""The tables of docs/throughput.md: what the committed results of the long suites say.

    PYTHONPATH=module_utils python -m tests.gates.throughput_table

Writes them between their markers; tests/unit/test_throughput_table.py keeps them equal to their sources.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests import pages

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/throughput.md"
ALONE, PLAIN = "history alone, steady rate", "history alone, mean of the trials"
SERVERS = {"scripted": "scripted", "vllm_cpu_tiny_glm": "vLLM, CPU"}
NUMBERS = {
    "ttft_ms": "TTFT, median, ms",
    "tpot_ms": "time per output token, mean, ms",
    "itl_ms": "ITL, median, ms",
    "output_tok_s": "output tok/s",
}


def load(name: str) -> dict[str, Any]:
    """A committed result."""
    return pages.load(HERE / f"{name}.json")


def render_power(power: Mapping[str, Any]) -> str:
    """False alarms and what is caught, by the number of earlier starts."""
    rows = power["earlier_starts"]
    first = next(iter(rows.values()))
    healthy, slow = first["false_alarms"]["starts"], first["caught"]["starts"]
    alone, plain = (power["for_comparison"][name] for name in (ALONE, PLAIN))
    slower = f"{_percent(power['slowdown'], 0)} slower"
    lines = [
        f"{healthy} healthy and {slow} slower starts ({power['date'][:10]}):",
        "",
        f"| earlier starts | healthy: alarms | {slower}: caught | history alone: caught | "
        "mean of the trials, history alone: caught |",
        "|---|---|---|---|---|",
        *(
            f"| {starts} | {_share(row['false_alarms'], 2)} | {_share(row['caught'], 1)} | "
            f"{_percent(alone[starts]['caught']['share'], 0)} | {_percent(plain[starts]['caught']['share'], 0)} |"
            for starts, row in rows.items()
        ),
    ]
    return _text(lines)


def render_hosts(power: Mapping[str, Any]) -> str:
    """False alarms of hosts whose starts really differ by more or less than is assumed."""
    hosts = power["false_alarms_of_hosts_that_vary_by"]
    ages = list(next(iter(hosts.values())))
    lines = [
        f"| starts really differ by | {' | '.join(f'{age} earlier' for age in ages)} |",
        "|---" * (len(ages) + 1) + "|",
        *(
            f"| {sd.replace('%', ' %')} | {' | '.join(_percent(alarms[age], 1) for age in ages)} |"
            for sd, alarms in hosts.items()
        ),
    ]
    return _text(lines)


def render_generator(power: Mapping[str, Any]) -> str:
    """What the load generator reads. An older result does not count the streams that came in bursts."""
    limit = power["generators_limit"]
    paced, unpaced = limit["paced_at_57_tok_s"], limit["unpaced"]
    counted = any("bursts" in row for row in paced)
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "streams at 57 tok/s": lambda row: str(row["streams"]),
        "events/s": lambda row: str(row["events_s"]),
        "decode tok/s": lambda row: "" if row.get("decode_tok_s") is None else f"{row['decode_tok_s']:.2f}",
        "ITL p50, p99": lambda row: _itl(row.get("itl_ms")),
        **({"came in bursts": lambda row: str(row.get("bursts", ""))} if counted else {}),
        "busy": lambda row: _percent(row["busy"], 0),
        "starved": lambda row: _percent(row["starved"], 0),
    }
    lines = [
        f"| {' | '.join(cells)} |",
        "|---" * len(cells) + "|",
        *(
            "".join(f"| {cell(row)} ".replace("|  ", "| ") for cell in cells.values()) + "|"
            for row in (*paced, {"streams": "8, as fast as they come", **unpaced})
        ),
    ]
    return _text(lines)


def render_beside(beside: Mapping[str, Any]) -> str:
    """Each number of both tools, and which of them the rounds do not explain."""
    lines = [
        f"Medians of {beside['rounds']} rounds ({beside['date'][:10]}):",
        "",
        "| server | streams of each tool | | Octoserve | `vllm bench serve` | difference | rounds differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    within, by_rounds, apart = 0, 0, []
    for server, streams, name, number in _beside(beside):
        lines.append(
            f"| {server} | {streams} | {NUMBERS[name]} | {number['octoserve']:.2f} | {number['vllm_bench']:.2f} | "
            f"{100 * number['difference']:+.1f} % | {_percent(number['rounds_differ'], 1)} |"
        )
        if number["within_2_percent"]:
            within += 1
        elif server != SERVERS["scripted"] and abs(number["difference"]) <= number["rounds_differ"]:
            by_rounds += 1
        else:
            apart.append(f"{NUMBERS[name]} ({server}, streams: {streams})")
    total = within + by_rounds + len(apart)
    lines += [
        "",
        f"{within} of {total} numbers lie within 2 %, on real vLLM {by_rounds} more within what the rounds differ by;",
        f"further apart: {'; '.join(apart) or 'none'}. The file says `agree: {str(beside['agree']).lower()}`.",
    ]
    return _text(lines)


def tables() -> dict[str, str]:
    """Each table by the name of its markers."""
    power = load("throughput_power")
    return {
        "power": render_power(power),
        "hosts": render_hosts(power),
        "generator": render_generator(power),
        "beside": render_beside(load("throughput_beside_vllm")),
    }


def _beside(beside: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    for key, server in SERVERS.items():
        for streams, numbers in beside[key].items():
            for name in NUMBERS:
                yield server, streams, name, numbers[name]


def _share(found: Mapping[str, Any], digits: int) -> str:
    low, high = (f"{100 * end:.{digits}f}" for end in found["ci95"])
    return f"{_percent(found['share'], digits)} ({low} to {high})"


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


def _itl(percentiles: Mapping[str, float] | None) -> str:
    return f"{percentiles['p50']:.1f} ms, {percentiles['p99']:.0f} ms" if percentiles else ""


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the tables."""
    pages.fill(PAGE, tables())
    return 0


if __name__ == "__main__":
    sys.exit(main())
