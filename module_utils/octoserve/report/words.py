"""What a summary says in words: the verdict, why, what to do next. Shared by the page, the CI text and JUnit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GOOD, WARNING, BAD, UNKNOWN = "good", "warning", "bad", "unknown"
NONE = "\u2013"  # a dash in a table, where there is no number
SENTENCE_CHARS = 260
# Of a long text; the needles' prompts are as long as the model takes them.
FIRST_CHARS, LAST_CHARS = 4000, 1000
_DIFFERENCES = {
    "drift": "from its reference",
    "again": "asked again",
    "under_load": "under load",
    "against_prefill": "decoded and computed again",
}


@dataclass(frozen=True)
class Verdict:
    """``state`` is one of the four above; ``command`` what to type next, empty where there is nothing."""

    state: str
    headline: str
    sentence: str
    next_step: str
    command: str = ""


@dataclass(frozen=True)
class Check:
    """One line below the verdict: whether one part of the run holds."""

    name: str
    state: str
    text: str


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table, a dash where there is none."""
    return NONE if value is None else f"{value:,.{digits}f}".replace(",", "\u202f")


def tokens(count: float) -> str:
    """A length in tokens as the sweeps name it: 8k, 32k, 512; 0 is a short prompt."""
    if not count:
        return "short"
    return f"{count / 1024:g}k" if count >= 1024 and count % 1024 == 0 else f"{count:g}"


def plural(count: int, noun: str) -> str:
    """``3 cases``, ``1 case``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cut(text: str, limit: int = SENTENCE_CHARS) -> str:
    """The first line that says something, with the next where it announces it; not longer than the limit."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


def excerpt(text: str) -> str:
    """A long text without its middle, and how much that was."""
    left_out = len(text) - FIRST_CHARS - LAST_CHARS
    if left_out <= 0:
        return text
    note = f"[{number(left_out, 0)} characters left out here; all are in raw/coherence.json]"
    return f"{text[:FIRST_CHARS]}\n\n{note}\n\n{text[-LAST_CHARS:]}"


def ask_again(summary: Mapping[str, Any]) -> str:
    """The command that lets the gates ask again."""
    return f"ansible-playbook playbooks/gates.yml -i {summary['inventory'] or '…'}"


def measured(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a case measured, as pairs of name and value; empty for a question."""
    found = case.get("measured") or {}
    pairs: list[tuple[str, str]] = []
    if found.get("perplexity") is not None:
        pairs.append(("perplexity", perplexity(found)))
    if found.get("tokens") is not None:
        pairs.append(("tokens scored", str(found["tokens"])))
    for key, name in _DIFFERENCES.items():
        if difference := found.get(key):
            bound = found.get("drift_bound" if key == "drift" else "bound")
            pairs.append((f"{name}, logprob difference", _difference(difference, bound)))
    if found.get("stream"):
        pairs.append(("streamed", str(found["stream"])))
    if found.get("prompt_tokens") is not None:
        pairs.append(("prompt tokens", str(found["prompt_tokens"])))
    if found.get("depth") is not None:
        pairs.append(("needle at", f"{percent(found['depth'], 0)} of the text"))
    return pairs


def perplexity(found: Mapping[str, Any]) -> str:
    """A perplexity beside its limits."""
    limit, lowest = found.get("limit"), found.get("lowest")
    if limit is not None and lowest is not None:
        return f"{found['perplexity']:.4g} (wanted {lowest:.4g} to {limit:.4g})"
    return f"{found['perplexity']:.4g} ({'no limit yet' if limit is None else f'limit {limit:.4g}'})"


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{100 * share:.{digits}f} %"


def point_name(point: Mapping[str, Any]) -> str:
    """``concurrency 16``, ``context 8k``."""
    if point["sweep"] == "context":
        return f"context {tokens(point['context_tokens'])}"
    if point["sweep"] == "concurrency":
        return f"concurrency {point['concurrency']}"
    return f"{point['sweep']}, concurrency {point['concurrency']}"


def answered(point: Mapping[str, Any]) -> str:
    """How many requests of a point were answered whole."""
    return f"{point['requests'] - point['failed'] - point.get('cut', 0)} of {point['requests']}"


def point_line(point: Mapping[str, Any]) -> str:
    """The numbers of one point."""
    ttft, gap = point["ttft_ms"] or {}, point["itl_ms"] or {}
    return (
        f"{number(point['output_tok_s'])} tok/s in all, {number(point['decode_tok_s'])} tok/s each; "
        f"TTFT p50 {number(ttft.get('p50'), 0)} ms, inter-token p99 {number(gap.get('p99'))} ms; "
        f"{answered(point)} requests answered"
    )


def throughput_line(result: Mapping[str, Any]) -> str:
    """The numbers of the counting prompt; empty where nothing was measured."""
    decode = result.get("decode_tok_s")
    if not decode:
        return ""
    spread = f" (95 %: {number(decode['ci95'][0])} to {number(decode['ci95'][1])})" if decode.get("ci95") else ""
    return (
        f"{number(decode['mean'])} tok/s decode{spread} over {plural(decode['n'], 'trial')}, "
        f"TTFT {number(result['ttft_ms'], 0)} ms, {number(result['end_to_end_tok_s'])} tok/s end to end"
    )


def baseline_line(baseline: Mapping[str, Any] | None) -> str:
    """How this start stands among the earlier ones, and what the alarm can see; empty where nothing is known."""
    if not baseline:
        return ""
    starts = plural(baseline["starts"], "earlier start")
    if baseline.get("alarm_below") is None:
        return f"{starts} on this host; until there are three, only the floor of the profile counts."
    change = baseline["change"]
    line = (
        f"{starts} on this host reached {number(baseline['mean'], 2)} tok/s; this one is {percent(abs(change))} "
        f"{'below' if change < 0 else 'above'}. The alarm goes off below {number(baseline['alarm_below'], 2)} tok/s"
    )
    alpha, seen = baseline.get("alpha"), baseline.get("detectable_slowdown")
    line += f", falsely in {percent(alpha, 0)} of healthy starts" if alpha else ""
    if seen is not None:
        return f"{line}; it catches a slowdown of {percent(seen)} in 95 % of cases."
    if baseline.get("smallest_slowdown") is not None:
        return f"{line}; the smallest slowdown that it can see is {percent(baseline['smallest_slowdown'])}."
    return f"{line}."


def verdict(summary: Mapping[str, Any], cause: Mapping[str, Any] | None) -> Verdict:
    """What holds or what failed, why in a sentence, and what to do next.

    ``cause`` is the task that the failure began with: ``phase``, ``name``, ``status``, ``message``.
    """
    failed = summary["failed_phase"]
    if summary["ok"]:
        return _passed(summary)
    if failed is None:
        return Verdict(
            UNKNOWN,
            "Not proven",
            "Nothing failed, but the gates did not both run, and that is not a pass.",
            "Let the gates ask:",
            ask_again(summary),
        )
    found = {"coherence": _coherence, "throughput": _throughput}.get(failed, _chapter)(summary, cause or {})
    if not summary["restored"]:
        return found
    headline = f"{found.headline}; rolled back" if summary["rolled_back"] else found.headline
    sentence = f"{found.sentence} {restored(summary)}"
    return Verdict(found.state, headline, sentence, found.next_step, found.command)


def restored(summary: Mapping[str, Any]) -> str:
    """What serves after a deployment failed."""
    number = summary["restored"]["deployment"]
    if number is None:
        return "Nothing served before it, so the service is stopped."
    if summary["rolled_back"]:
        return f"Deployment {number}, which served before, is back, and its gates passed."
    if "coherence" in summary["restored"]:
        return f"Deployment {number}, which served before, is back, but does not pass its gates now."
    return f"Deployment {number}, which served before, did not come back."


def checks(summary: Mapping[str, Any]) -> list[Check]:
    """The parts of the run, in order: the deploy, coherence, throughput."""
    failed, coherence, throughput = summary["failed_phase"], summary["coherence"], summary["throughput"]
    # A run of the gates alone deployed nothing: the line would claim what nobody looked at.
    deployed = [phase for phase in summary["phases"] if phase["name"] not in ("preflight", "gates")]
    found = []
    if failed in ("preflight", "install", "start"):
        found.append(Check("Deploy", BAD, f"failed in {failed}"))
    elif deployed:
        seconds = sum(phase["seconds"] for phase in summary["phases"] if phase["name"] != "gates")
        changed = sum(phase["changed"] for phase in summary["phases"] if phase["name"] != "gates")
        found.append(Check("Deploy", GOOD, f"{plural(changed, 'change')} in {duration(seconds)}"))
    found.append(Check("Coherence", coherence_state(coherence), coherence_text(coherence)))
    text = throughput_line(throughput)
    if throughput["verdict"] not in ("pass",):
        text = f"{throughput['verdict'].replace('-', ' ')}{f': {text}' if text else ''}"
    found.append(Check("Throughput", throughput_state(throughput), text))
    return found


def coherence_state(coherence: Mapping[str, Any]) -> str:
    """Good, bad where an answer is wrong, otherwise unknown."""
    if coherence["ok"]:
        return GOOD
    return BAD if any(case["verdict"] == "fail" for case in coherence["cases"]) else UNKNOWN


def throughput_state(result: Mapping[str, Any]) -> str:
    """Good, a warning for a regression that only warns, bad, or unknown where nothing was measured."""
    if result["ok"]:
        return WARNING if result["verdict"] == "regression" else GOOD
    return BAD if result["verdict"] in ("fail", "regression") else UNKNOWN


def coherence_text(coherence: Mapping[str, Any]) -> str:
    """The counts in a line."""
    if not coherence["cases"]:
        return "no verdict"
    left_out = len(coherence.get("left_out") or [])
    text = f"{coherence['passed']} of {plural(coherence['total'], 'case')} passed"
    return f"{text}, {left_out} left out" if left_out else text


def _passed(summary: Mapping[str, Any]) -> Verdict:
    coherence, throughput = summary["coherence"], summary["throughput"]
    if throughput["verdict"] == "regression":
        return Verdict(
            WARNING,
            "Right answers, but slower than before",
            cut(throughput["reason"]),
            "Look what changed since the earlier starts: clocks, driver, neighbours, settings. Then measure again:",
            ask_again(summary),
        )
    decode = throughput["decode_tok_s"]["mean"]
    cases = "The one case" if coherence["total"] == 1 else f"All {coherence['total']} cases"
    sentence = f"{cases} passed, and one request decodes {number(decode)} tokens a second."
    if coherence.get("recorded"):
        step = "Take gates_bootstrap out: what the texts measured is recorded on the host, and holds for later deploys."
        return Verdict(GOOD, "Right answers, fast enough", sentence, step)
    baseline = throughput.get("baseline") or {}
    if "alarm_below" in baseline and baseline["alarm_below"] is None:
        step = "Nothing to do. After three healthy starts a slowdown raises an alarm; until then the floor does."
    else:
        step = "Nothing to do."
    return Verdict(GOOD, "Right answers, fast enough", sentence, step)


def _coherence(summary: Mapping[str, Any], cause: Mapping[str, Any]) -> Verdict:
    coherence = summary["coherence"]
    wrong = [case for case in coherence["cases"] if case["verdict"] == "fail"]
    silent = [case for case in coherence["cases"] if case["verdict"] not in ("pass", "fail")]
    if wrong:
        return Verdict(
            BAD,
            "The model answers wrong",
            _first(wrong, coherence["total"], "fails", "fail"),
            "Send it no traffic. Throughput was not measured. Read the failed cases below, mend, and ask again:",
            ask_again(summary),
        )
    if silent:
        sentence = _first(silent, coherence["total"], "could not be judged", "could not be judged")
        if all(_without_limit(case) for case in silent):
            if any("the profile's" in case["measured"].get("reference", "") for case in silent):
                step = "Take gates.reference out of the profile, and let a deploy record anew what the host measures:"
            else:
                step = "Where this is the first deploy of the profile or of its texts, record what it measures, once:"
            command = f"ansible-playbook site.yml -i {summary['inventory'] or '…'} -e gates_bootstrap=true"
            return Verdict(UNKNOWN, "Nothing to hold its texts to yet", sentence, step, command)
        told = [case["reason"] for case in silent if not case["private"]]  # of a private one it is not told
        if told and all(re.search(r": HTTP 40[13] ", str(reason)) for reason in told):
            return Verdict(
                UNKNOWN,
                "The server does not take the API key",
                sentence,
                "Give the gates the service's key (octoserve_api_key: the vault of the deploy), then ask again:",
                ask_again(summary),
            )
        everything = len(silent) == len(coherence["cases"])
        return Verdict(
            UNKNOWN,
            "The model could not be asked" if everything else "Some cases could not be judged",
            sentence,
            "See whether the service runs and what it logs, then ask again:",
            f"journalctl --unit=octoserve-{summary.get('instance') or 'main'} --lines=100",
        )
    return Verdict(
        UNKNOWN,
        "The gates could not run",
        _reached(cause) or "The coherence gate gave no verdict.",
        "Remove the cause, then ask again:",
        ask_again(summary),
    )


def _throughput(summary: Mapping[str, Any], cause: Mapping[str, Any]) -> Verdict:
    result = summary["throughput"]
    if result["ok"]:
        sentence = _reached(cause) or "A task after the gates failed."
        return Verdict(
            BAD, "Right and fast enough, but the run failed", sentence, "Remove the cause, then:", ask_again(summary)
        )
    if result["verdict"] == "regression":
        headline, step = "Right answers, but slower than before", "Look what changed since the earlier starts"
    elif result["verdict"] == "fail" and result.get("decode_tok_s"):
        headline, step = (
            "Right answers, but not fast enough",
            "Look at clocks, temperatures and other users of the host",
        )
    elif result["verdict"] == "fail":
        headline, step = "Right answers, but the measurement failed", "Look at the reason below"
    else:
        sentence = result["reason"] if result["verdict"] == "could-not-run" else _reached(cause) or result["reason"]
        return Verdict(
            UNKNOWN,
            "Right answers, but the speed could not be measured",
            cut(str(sentence)),
            "Remove the cause, then ask again:",
            ask_again(summary),
        )
    return Verdict(BAD, headline, cut(str(result["reason"])), f"{step}, then measure again:", ask_again(summary))


def _chapter(summary: Mapping[str, Any], cause: Mapping[str, Any]) -> Verdict:
    failed = summary["failed_phase"]
    headline = {
        "preflight": "The host is not ready",
        "install": "The installation failed",
        "start": "The service did not start",
    }.get(failed, f"Failed in {failed}")
    if cause.get("status") == "unreachable":
        headline = "The host was not reached"
    step = "Nothing was proven. Remove the cause, told below in full, and deploy again; what is done already is kept:"
    return Verdict(
        BAD,
        headline,
        _reached(cause) or f"The chapter {failed} failed.",
        step,
        f"ansible-playbook site.yml -i {summary['inventory'] or '…'}",
    )


def _reached(cause: Mapping[str, Any]) -> str:
    """What the task said that the failure began with, in a sentence."""
    return cut(str(cause.get("message") or "")) or (f"The task “{cause['name']}” failed." if cause.get("name") else "")


def _without_limit(case: Mapping[str, Any]) -> bool:
    """Whether a text was scored, and only what to hold it to is missing."""
    found = case.get("measured") or {}
    loaded = (found.get("under_load") or {}).get("streams", 1)
    return found.get("perplexity") is not None and found.get("limit") is None and bool(loaded)


def _first(cases: Sequence[Mapping[str, Any]], total: int, one: str, many: str) -> str:
    first = cases[0]
    verb = one if len(cases) == 1 else many
    lead = "" if len(cases) == 1 else "first "
    return f"{len(cases)} of {plural(total, 'case')} {verb}; {lead}{first['name']}: {cut(first['reason'], 160)}"


def _difference(difference: Mapping[str, Any], bound: Mapping[str, Any] | None) -> str:
    """Mean and largest absolute difference of log probabilities, in nats, each with its bound."""
    parts = []
    for key in ("mean", "max"):
        if (value := difference.get(key)) is not None:
            limit = (bound or {}).get(key)
            parts.append(f"{key} {value:.2g}{f' (bound {limit:.2g})' if limit is not None else ''}")
    return ", ".join(parts) + " nats"
