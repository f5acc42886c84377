"""The gates' results for Prometheus, in its text format: https://prometheus.io/docs/instrumenting/exposition_formats/.

Every series has the label ``service``, the name of the Octoserve instance: one host may serve several, and
node_exporter refuses the same series from two files. Units are Prometheus' own: seconds, shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

Labels = dict[str, str]


@dataclass(frozen=True)
class Origin:
    """What the numbers are about. ``service`` is the instance; ``deployment`` may not be known."""

    service: str
    profile: str | None
    stack: str | None
    deployment: str | None


def exposition(
    origin: Origin,
    when: datetime,
    ok: bool,
    coherence: Mapping[str, Any] | None,
    throughput: Mapping[str, Any] | None,
) -> str:
    """All series as text. A gate that did not run is not ok, and shows nothing that it did not measure."""
    registry = CollectorRegistry()
    coherence, throughput = coherence or {}, throughput or {}

    def put(name: str, text: str, samples: Iterable[tuple[Labels, float | None]]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if not known:
            return
        gauge = Gauge(f"octoserve_{name}", text, ["service", *known[0][0]], registry=registry)
        for labels, value in known:
            gauge.labels(service=origin.service, **labels).set(value)

    about = {key: str(getattr(origin, key) or "") for key in ("profile", "stack", "deployment")}
    put("gates_info", "What the gates looked at last; always 1.", [(about, 1.0)])
    put("gates_last_run_timestamp_seconds", "When the gates last ran or should have.", _one(when.timestamp()))
    put("gates_ok", "1 where every gate ran and passed, else 0.", _one(float(ok)))
    put("coherence_ok", "1 where every case was asked and passed, else 0.", _one(float(bool(coherence.get("ok")))))
    put("coherence_cases", "Cases of the coherence gate.", _one(coherence.get("total", 0)))
    put("coherence_cases_passed", "Cases of the coherence gate that passed.", _one(coherence.get("passed", 0)))
    put("perplexity", "Perplexity of a fixed text.", _measured(coherence, lambda found: found.get("perplexity")))
    drift = _measured(coherence, lambda found: (found.get("drift") or {}).get("mean"))
    put("logprob_drift_nats", "Mean difference of a fixed text's log probabilities from its reference.", drift)
    put("throughput_ok", "1 where the throughput gate passed, else 0.", _one(float(bool(throughput.get("ok")))))
    decode, baseline = throughput.get("decode_tok_s") or {}, throughput.get("baseline") or {}
    put("decode_tokens_per_second", "Decode rate of one request, without its first token.", _one(decode.get("mean")))
    end_to_end = throughput.get("end_to_end_tok_s")
    put("end_to_end_tokens_per_second", "Completion tokens over the whole time of one request.", _one(end_to_end))
    put("ttft_seconds", "Mean time to first token of one request.", _one(_seconds(throughput.get("ttft_ms"))))
    gaps = throughput.get("itl_ms") or {}
    gap_text = "Inter-token latency of one request, by quantile."
    put("inter_token_latency_seconds", gap_text, _quantiles(gaps))
    put("baseline_starts", "Earlier starts that this one is compared with.", _one(baseline.get("starts")))
    put("baseline_decode_tokens_per_second", "Mean decode rate of the earlier starts.", _one(baseline.get("mean")))
    alarm = baseline.get("alarm_below")
    put("baseline_alarm_tokens_per_second", "Decode rate below which a start is a regression.", _one(alarm))
    points = [point for point in throughput.get("points") or [] if point["requests"]]
    outputs = [(_point(point), point["output_tok_s"]) for point in points]
    put("point_output_tokens_per_second", "Tokens per second of all streams together, at a point of a sweep.", outputs)
    waits = [(_point(point), _seconds((point["ttft_ms"] or {}).get("p50"))) for point in points]
    put("point_ttft_seconds", "Median time to first token at a point of a sweep.", waits)
    failures = [(_point(point), float(point["failed"])) for point in points]
    put("point_failed_requests", "Requests that failed at a point of a sweep.", failures)
    return generate_latest(registry).decode()


def _one(value: float | None) -> list[tuple[Labels, float | None]]:
    return [({}, value)]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _measured(
    coherence: Mapping[str, Any], look: Callable[[Mapping[str, Any]], float | None]
) -> Iterator[tuple[Labels, float | None]]:
    for case in coherence.get("cases") or []:
        yield {"text": case["name"]}, look(case.get("measured") or {})


def _quantiles(gaps: Mapping[str, Any]) -> Iterator[tuple[Labels, float | None]]:
    for name, quantile in (("p50", "0.5"), ("p95", "0.95"), ("p99", "0.99")):
        yield {"quantile": quantile}, _seconds(gaps.get(name))


def _point(point: Mapping[str, Any]) -> Labels:
    return {key: str(point[key]) for key in ("sweep", "concurrency", "context_tokens")}
