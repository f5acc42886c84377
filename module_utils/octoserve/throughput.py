"""The throughput gate: counting trials one at a time, a mix and sweeps, and the verdict on them.

The verdict rests on the counting trials: the floor on their mean decode rate, a regression on their steady rate
against earlier starts. A mix and sweeps show how the deployment behaves otherwise; a request of theirs that fails
keeps the gate from passing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Callable

from . import latency, load, prompts, student_t, sweep, sweep_plan, trial
from .openai_api import ApiError, Chunk, Client

PASSED = "pass"
FAILED = "fail"
REGRESSION = "regression"
COULD_NOT_RUN = "could-not-run"

COUNTING_PROMPT = "Count from 1 to 50, writing each number on a new line."
#: Called at each step: its name, steps done, steps in all, what steps are.
Report = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Request:
    """What is asked: the counting prompt ``warmup`` times, then ``trials`` times; ``options`` go into every request."""

    prompt: str = COUNTING_PROMPT
    max_tokens: int = 512
    trials: int = 20
    warmup: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """What a deployment must reach. ``expected_tokens`` None: the answer's length is not known beforehand."""

    floor_tok_s: float
    expected_tokens: int | None = None
    fail_on_regression: bool = False


@dataclass
class Measured:
    """What a gate measured so far. ``streams`` are those of the trials; ``obstacle``: why the sweeps broke off."""

    warmup: list[trial.Trial] = field(default_factory=list)
    trials: list[trial.Trial] = field(default_factory=list)
    streams: list[Sequence[Chunk]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    trials_cost: load.Cost = field(default_factory=lambda: load.total([]))
    costs: list[load.Cost] = field(default_factory=list)
    obstacle: str = ""


def count(client: Client, request: Request, measured: Measured, report: Report) -> None:
    """Ask the counting prompt one at a time. As many streams that were held back are asked again.

    Raises trial.MeasurementError, also where a request fails.
    """
    prompt = load.Prompt(request.prompt, request.max_tokens, request.options)
    costs = []
    held_back = 0
    for n in itertools.count():
        warming = n < request.warmup
        if not warming and len(measured.trials) == request.trials:
            break
        done = load.run(client, [prompt], 1)
        costs.append(done.cost)
        answer = done.answers[0]
        if answer.error:
            raise trial.MeasurementError(answer.error)
        try:
            found = trial.measure(answer.chunks, bursts=warming, limit=request.max_tokens)
        except trial.HeldBackError:
            held_back += 1
            if held_back > request.trials:
                raise
            continue
        (measured.warmup if warming else measured.trials).append(found)
        if not warming:
            measured.streams.append(answer.chunks)
            report("counting", len(measured.trials), request.trials, "trials")
    measured.trials_cost = load.total(costs)
    measured.costs.append(measured.trials_cost)


def sweeps(
    client: Client,
    settings: sweep_plan.Settings,
    max_num_seqs: int | None,
    options: Mapping[str, Any],
    report: Report,
) -> Iterator[tuple[dict[str, Any], load.Cost]]:
    """Measure point after point. Raises ApiError where the server does not answer to be asked about its limits."""
    writer = prompts.Writer(sweep_plan.SEED)

    def prompt_tokens(text: str) -> int:
        usage = client.chat([{"role": "user", "content": text}], 1, **options).usage
        if usage is None:
            raise trial.MeasurementError("the answer holds no usage, so a prompt's tokens cannot be counted")
        return usage.prompt_tokens

    points = sweep_plan.plan(settings)
    if not points:
        return
    served = sweep_plan.Served(client.max_model_len(), max_num_seqs)
    sizing = prompts.size(writer, prompt_tokens)
    for n, point in enumerate(points):
        report(point.name, n, len(points), "points")
        obstacle = sweep_plan.obstacle(point, served)
        if obstacle:
            yield sweep.left_out(point, obstacle), load.total([])
        else:
            yield sweep.run(client, point, settings.point_seconds, writer=writer, sizing=sizing, options=options)


def summarize(measured: Measured) -> dict[str, Any]:
    """The numbers as ``summary.json`` and ``raw/throughput.json`` hold them."""
    decode, end_to_end, ttft = (
        student_t.summarize(values)
        for values in (
            [one.decode_tok_s for one in measured.trials],
            [one.end_to_end_tok_s for one in measured.trials],
            [one.ttft_s * 1000 for one in measured.trials],
        )
    )
    spent = load.total(measured.costs)
    return {
        "decode_tok_s": decode,
        "steady_tok_s": asdict(trial.steady_rate(measured.streams)),
        "ttft_ms": ttft["mean"],
        "end_to_end_tok_s": end_to_end["mean"],
        "details": {"ttft_ms": ttft, "end_to_end_tok_s": end_to_end},
        "completion_tokens": measured.trials[0].completion_tokens,
        "trials": [asdict(one) for one in measured.trials],
        "warmup": [asdict(one) for one in measured.warmup],
        "itl_ms": latency.describe_ms([wait for chunks in measured.streams for wait in trial.gaps(chunks)]),
        "points": measured.points,
        "generator": {
            "busy": spent.busy,
            "starved": spent.starved,
            "ceiling_events_s": spent.ceiling,
            "bottleneck": measured.trials_cost.bottleneck,
        },
    }


def judge(measured: Measured, limits: Limits, baseline: Mapping[str, Any]) -> dict[str, Any]:
    """``{"ok", "verdict", "reason"}``. Below the floor is never ok, a regression is where it only warns.

    ``baseline`` is what ``baseline.compare`` found.
    """
    counts = sorted({one.completion_tokens for one in measured.trials})
    if limits.expected_tokens is not None and counts != [limits.expected_tokens]:
        found = ", ".join(map(str, counts))
        return _verdict(FAILED, f"answers of {found} tokens, wanted exactly {limits.expected_tokens}")
    cost = measured.trials_cost
    spoiled = (
        f"; but the load generator was the bottleneck (busy {cost.busy:.0%} of a core, without one {cost.starved:.0%} "
        "of the time), so this is no word on the server: measure when the host is less busy"
        if cost.bottleneck
        else ""
    )
    mean = student_t.summarize([one.decode_tok_s for one in measured.trials])["mean"]
    if mean < limits.floor_tok_s:
        below = f"{mean:.2f} tok/s, the floor of the profile is {limits.floor_tok_s:g}"
        return _verdict(COULD_NOT_RUN if spoiled else FAILED, below + spoiled)
    broken = [f"{point_name(point)}: {point['reason']}" for point in measured.points if point["failed"]]
    broken += [measured.obstacle] if measured.obstacle else []
    if broken:
        return _verdict(COULD_NOT_RUN, "; ".join(broken))
    if not baseline["regression"]:
        return {"ok": True, "verdict": PASSED, "reason": ""}
    slower = (
        f"{-baseline['change']:.1%} slower than the mean {baseline['mean']:.2f} tok/s of {baseline['starts']} "
        f"earlier starts; alarm below {baseline['alarm_below']:.2f}"
    )
    if spoiled:
        return _verdict(COULD_NOT_RUN, slower + spoiled)
    return {"ok": not limits.fail_on_regression, "verdict": REGRESSION, "reason": slower}


def gate(
    client: Client,
    request: Request,
    limits: Limits,
    compare: Callable[[float], dict[str, Any]],
    *,
    settings: sweep_plan.Settings | None = None,
    max_num_seqs: int | None = None,
    report: Report = lambda name, done, total, unit: None,
) -> dict[str, Any]:
    """Measure and judge; what cannot be measured is ``could-not-run``, no exception.

    ``compare`` compares a steady rate (tok/s) with the baseline. Without ``settings`` only the trials are run.
    """
    measured = Measured()
    try:
        count(client, request, measured, report)
    except (ApiError, trial.MeasurementError) as error:
        return could_not_run(str(error))
    try:
        for point, cost in sweeps(client, settings, max_num_seqs, request.options, report) if settings else ():
            measured.points.append(point)
            measured.costs.append(cost)
    except (ApiError, trial.MeasurementError) as error:
        measured.obstacle = f"the sweeps could not be measured: {error}"
    summary = summarize(measured)
    baseline = compare(summary["steady_tok_s"]["mean"])
    return {**judge(measured, limits, baseline), **summary, "baseline": baseline}


def could_not_run(reason: str) -> dict[str, Any]:
    """The result of a gate that measured nothing."""
    return {
        **_verdict(COULD_NOT_RUN, reason),
        "decode_tok_s": None,
        "steady_tok_s": None,
        "ttft_ms": None,
        "end_to_end_tok_s": None,
        "details": {},
        "completion_tokens": None,
        "trials": [],
        "warmup": [],
        "itl_ms": None,
        "points": [],
        "generator": None,
        "gpus": None,
        "baseline": None,
    }


def describe(result: Mapping[str, Any]) -> str:
    """The result in a few lines for people."""
    if not result["trials"]:
        return f"throughput: {result['verdict']}: {result['reason']}"
    decode, baseline = result["decode_tok_s"], result["baseline"]
    spread = "" if decode["ci95"] is None else " (95 % {:.2f} to {:.2f})".format(*decode["ci95"])
    if baseline["alarm_below"] is None:
        against = f"{baseline['starts']} earlier start{'' if baseline['starts'] == 1 else 's'}: only the floor counts"
    else:
        against = (
            f"steady rate {result['steady_tok_s']['mean']:.2f}, of {baseline['starts']} earlier starts "
            f"{baseline['mean']:.2f} (stalls and TTFT apart), {_seen(baseline)}"
        )
    lines = [
        f"throughput: {result['verdict']}: decode {decode['mean']:.2f} tok/s{spread} over {decode['n']} trials, "
        f"TTFT {result['ttft_ms']:.0f} ms, end to end {result['end_to_end_tok_s']:.2f} tok/s; {against}"
    ]
    lines += [result["reason"]] if result["reason"] else []
    lines += [_line(point) for point in result["points"]]
    return "\n".join(lines)


def _seen(baseline: Mapping[str, Any]) -> str:
    """Which slowdown would be seen; none, where the earlier starts differ by more than a rate can fall."""
    alarm, caught = baseline["smallest_slowdown"], baseline["detectable_slowdown"]
    if alarm >= 1:
        return "which differ so much that no slowdown would raise an alarm"
    certain = "none with 95 %" if caught >= 1 else f"caught with 95 % from {caught:.1%}"
    return f"alarm from {alarm:.1%} slower, {certain}"


def _line(point: Mapping[str, Any]) -> str:
    """A point in a line."""
    if point["output_tok_s"] is None:
        return f"  {point_name(point)}: {point['reason']}"
    note = f" ({point['reason']})" if point["reason"] else ""
    each = "" if point["decode_tok_s"] is None else f", {point['decode_tok_s']:.1f} each"
    return (
        f"  {point_name(point)}: {point['output_tok_s']:.1f} tok/s together{each}, "
        f"TTFT p50 {point['ttft_ms']['p50']:.0f} ms, prompts of {point['prompt_tokens']:.0f} tokens{note}"
    )


def point_name(point: Mapping[str, Any]) -> str:
    return sweep_plan.Point(point["sweep"], point["concurrency"], point["context_tokens"], ()).name


def _verdict(verdict: str, reason: str) -> dict[str, Any]:
    return {"ok": False, "verdict": verdict, "reason": reason}
