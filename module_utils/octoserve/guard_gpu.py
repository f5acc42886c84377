"""Guard before start: every card is there and its memory is free.

    python -m octoserve.guard_gpu --utilization 0.95 --timeout 300 [--expected-count 8]

Meant for a unit's ExecStartPre. Progress goes to stdout, the reason of a failure as one line to stderr.
Exit codes: 0 free, 1 memory not free in time, 2 wrong usage, 3 no driver or cannot see, 4 driver and
library differ, 5 a card does not answer, 6 wrong number of cards, 7 NVML does not return. 4 to 7 do not mend
themselves: starting again is useless before someone has acted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import TYPE_CHECKING

from . import bounded, nvml

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_CODES = {
    nvml.MEMORY_NOT_FREE: 1,
    nvml.NO_DRIVER: 3,
    nvml.CANNOT_SEE: 3,
    nvml.VERSION_MISMATCH: 4,
    nvml.LOST_CARD: 5,
    nvml.WRONG_COUNT: 6,
    nvml.NO_ANSWER: 7,
}


def load_module() -> None:
    """Load nvidia-uvm and make its device file, where the driver's tool is there.

    CUDA does so itself through that tool, which is setuid root; in a unit without new privileges it cannot. Where it
    fails, the server says so.
    """
    if tool := shutil.which("nvidia-modprobe"):
        bounded.run([tool, "-u", "-c=0"], timeout_s=60)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the guard and return its exit code."""
    parser = argparse.ArgumentParser(prog="octoserve.guard_gpu", description="Wait until every GPU's memory is free.")
    parser.add_argument("--utilization", type=float, required=True, help="vLLM's gpu_memory_utilization, e.g. 0.95")
    parser.add_argument("--timeout", type=float, required=True, help="seconds to wait at most")
    parser.add_argument("--expected-count", type=int, help="number of cards that must be there")
    options = parser.parse_args(argv)
    try:
        nvml.check_limits(options.utilization, options.timeout)
        load_module()
        with nvml.session() as read:
            gpus = nvml.wait_until_free(
                read,
                options.utilization,
                options.timeout,
                expected_count=options.expected_count,
                report=lambda line: print(line, flush=True),
            )
    except ValueError as error:
        parser.error(str(error))
    except nvml.GpuError as error:
        print(f"octoserve.guard_gpu: {error}", file=sys.stderr)
        return EXIT_CODES[error.problem]
    least = min(card.memory_free for card in gpus.cards)
    print(f"GPU memory is free on {len(gpus.cards)} card(s), at least {least / nvml.GIB:.2f} GiB each.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
