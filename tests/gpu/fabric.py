#!/usr/bin/env python3
"""The fabric check on the cards of this machine: values and time per all-reduce, with and without peer-to-peer traffic.

    python tests/gpu/fabric.py OUT

Needs two cards or more and OCTOSERVE_CUDA_PYTHON, an interpreter with torch for CUDA. OUT gets ``fabric.json``: cards
and their links, versions of driver, torch and NCCL, and per run what octoserve.fabric_check says. Ends 1 where a run
failed.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "module_utils")]

from tests.gpu import loader_proof

#: Environment by run. The second is what the check advises where the first hangs or is wrong.
RUNS = {"as it is": {}, "NCCL_P2P_DISABLE=1": {"NCCL_P2P_DISABLE": "1"}}
TOLD = "name,driver_version,pci.bus_id,pcie.link.gen.max,pcie.link.width.max"


def missing() -> str | None:
    """What keeps it from running here."""
    if len(loader_proof.cards_here()) < 2:
        return f"found {len(loader_proof.cards_here())} NVIDIA cards, wanted two or more"
    if not os.environ.get("OCTOSERVE_CUDA_PYTHON"):
        return "OCTOSERVE_CUDA_PYTHON is not set, wanted an interpreter with torch for CUDA"
    return None


def cards() -> list[dict[str, str]]:
    """Each card and its link, as nvidia-smi says."""
    command = ["nvidia-smi", f"--query-gpu={TOLD}", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    return [dict(zip(TOLD.split(","), line.split(", "), strict=True)) for line in lines]


def versions(python: str) -> dict[str, str]:
    """Versions of torch and NCCL."""
    code = "import json, torch; v = torch.cuda.nccl.version(); print(json.dumps([torch.__version__, v]))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    torch, nccl = json.loads(done.stdout)
    return {"torch": torch, "nccl": ".".join(map(str, nccl))}


def check(python: str, ranks: int, environment: dict[str, str]) -> dict[str, Any]:
    """One run: the check's own document, or why it failed."""
    command = [python, "-m", "octoserve.fabric_check", f"--ranks={ranks}"]
    where = {**os.environ, "PYTHONPATH": str(ROOT / "module_utils"), **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=where)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"ok": False, "said": done.stderr}
    return found


def measure() -> dict[str, Any]:
    """All runs, and what they were made on."""
    python, found = os.environ["OCTOSERVE_CUDA_PYTHON"], cards()
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": loader_proof.commit(),
        "cards": found,
        **versions(python),
    }
    return {**about, "runs": {name: check(python, len(found), environment) for name, environment in RUNS.items()}}


def main(out: Path) -> int:
    """Write the result."""
    if reason := missing():
        print(f"not run: {reason}")
        return 1
    result = measure()
    out.mkdir(parents=True, exist_ok=True)
    (out / "fabric.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, run in result["runs"].items():
        print(f"{name}: {run['line'] if run['ok'] else run['said'].strip()}")
    return 0 if all(run["ok"] for run in result["runs"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
