"""Speed of the sparse attention kernels on a card of this machine: `make bench-gpu`, and the end of `make bench`.

    python tests/gpu/bench.py OUT

Runs the scripts of SCRIPTS with OCTOSERVE_CUDA_PYTHON, the interpreter of an installed, unpatched CUDA stack, and
leaves OUT/<script>.json of each; its rows are printed as they come. Ends 0 without a card, after saying so, and 1
where the interpreter is missing or a script failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu import loader_proof

HERE = Path(__file__).parent
#: With the major compute capability that they need; None for any that the kernel is made for.
SCRIPTS: dict[str, int | None] = {"triton_mla_sparse": None, "triton_mla_sparse_beside": 9, "triton_indexer": None}


def main(out: Path) -> int:
    """Run what this card can."""
    if not loader_proof.cards_here():
        print("no card: GPU part not run (nvidia-smi does not answer)")
        return 0
    python = os.environ.get("OCTOSERVE_CUDA_PYTHON", "")
    if not python:
        print("a card, but OCTOSERVE_CUDA_PYTHON is not set: GPU part not run. Make a CUDA stack, and name its python:")
        stack = loader_proof.SERIES.name
        made = f".cache/stacks/{stack}-cuda"
        print(f"  PYTHONPATH=module_utils .venv/bin/python scripts/stack_venv.py {stack} cuda {made}")
        print(f"  OCTOSERVE_CUDA_PYTHON=$PWD/{made}/bin/python make bench-gpu")
        return 1
    code = "import torch, triton; print(torch.cuda.get_device_capability()[0])"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = asked.stderr.strip().splitlines()
        print(f"OCTOSERVE_CUDA_PYTHON={python}: wanted torch with CUDA and Triton, and a card; found {said[-1:]}")
        return 1
    capability = int(asked.stdout)
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, wanted in SCRIPTS.items():
        if wanted not in (None, capability):
            print(f"{name}: not run, its other kernels need SM{wanted}x, this card is SM{capability}x")
            continue
        record = out / f"{name}.json"
        command = [python, str(HERE / f"{name}.py"), str(record), "--commit", loader_proof.commit()]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        print(f"{name}: {'FAILED, see above' if name in failed else record}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
