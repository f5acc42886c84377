"""Filter: what the gates found, in Prometheus' text format."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "module_utils"))


def gates_metrics(coherence: Mapping[str, Any], throughput: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    """Text for node_exporter of the modules' results, empty where a gate did not run; ``origin`` is metrics.Origin."""
    from octoserve import evidence
    from octoserve.report import metrics

    now = datetime.now(timezone.utc)
    right = evidence.coherence_of(coherence) if _ran(coherence) else None
    fast = evidence.throughput_of(throughput) if _ran(throughput) else None
    ok = bool(right and right["ok"] and fast and fast["ok"])
    return metrics.exposition(metrics.Origin(**origin), now, ok, right, fast)


def _ran(result: Mapping[str, Any]) -> bool:
    return "ok" in result and not result.get("skipped")


class FilterModule:
    """What Ansible asks a filter plugin for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names as templates use them."""
        return {"gates_metrics": gates_metrics}
