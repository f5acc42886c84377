"""At boot: a deployment that was never proven makes way for the one whose gates passed last.

    python -m octoserve.recover /var/lib/octoserve/deployments/main --unit-file … --environment-file …

A power cut in the middle of a deploy leaves the unit of a deployment whose gates nobody asked, and nobody who would
bring the proven one back; where none was ever proven, what was set up by hand and gave way comes back. Run by a unit of
its own before the service starts; a boot with nothing to recover changes nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import atomic, deployment, give_way, unit_file

#: The one line that stands in the environment file and in no record.
SECRET = "VLLM_API_KEY="  # noqa: S105 - a name, no key


def unproven(folder: Path) -> int | None:
    """The deployment that would start and was never proven, where there is a proven one to start instead."""
    number, current = deployment.running(folder), deployment.current(folder)
    if number is None or current is None or number == current or deployment.state(folder, number) == "passed":
        return None
    return number


def environment_text(content: dict[str, Any], before: str) -> str:
    """The environment file of a deployment, with the key that the file holds now."""
    lines = unit_file.environment(content["environment"]).splitlines(keepends=True)
    lines += [line for line in before.splitlines(keepends=True) if line.startswith(SECRET)]
    return "".join(sorted(lines, key=lambda line: line.partition("=")[0]))


def recover(folder: Path, number: int, unit: Path, environment: Path) -> None:
    """Write unit and environment of a deployment, then note those that were in service beside it as failed.

    Once more from the start where the power is cut again: the notes come last. Raises OSError or DeploymentError.
    """
    content = deployment.read(folder, number)
    before = environment.read_text() if environment.exists() else ""
    atomic.write_text(environment, environment_text(content, before), 0o600)
    atomic.write_text(unit, content["unit"])
    if deployment.state(folder, number) in deployment.OUT:  # `current` all the same: it did pass
        deployment.set_state(folder, number, "passed")
    for other in deployment.numbers(folder):
        if other != number and deployment.state(folder, other) == "recorded":
            deployment.set_state(folder, other, "failed")


def go_back_by_hand(folder: Path, unit: str) -> str:
    """Where no deployment was ever proven, start what gave way instead of it. Returns its name, else empty."""
    if give_way.read(folder) is None or deployment.current(folder) is not None:
        return ""
    for number in deployment.numbers(folder):
        if deployment.state(folder, number) == "recorded":
            deployment.set_state(folder, number, "failed")
    subprocess.run(["systemctl", "disable", unit], check=True, timeout=60)
    # Its start waits for this program.
    subprocess.run(["systemctl", "--no-block", "stop", unit], check=True, timeout=60)
    return give_way.come_back(folder, wait=False)


def wanted(folder: Path, unit: Path) -> int | None:
    """The deployment to write down anew, None where the unit is the one of what is to run."""
    current = deployment.current(folder)
    if unproven(folder) is not None:
        return current
    number = deployment.running(folder)
    # The power was cut between the decision for a deployment and its unit.
    if number is None or not unit.exists() or unit.read_text() == deployment.read(folder, number)["unit"]:
        return None
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Recover where there is something to recover."""
    parser = argparse.ArgumentParser(prog="octoserve.recover", description="Start what was proven.")
    parser.add_argument("folder", type=Path, help="folder of the instance's deployments")
    parser.add_argument("--unit-file", type=Path, required=True, help="unit of the service")
    parser.add_argument("--environment-file", type=Path, required=True, help="its environment")
    options = parser.parse_args(argv)
    try:
        if by_hand := go_back_by_hand(options.folder, options.unit_file.name):
            print(f"a first deploy was cut short; {by_hand}, which was set up by hand, starts")
            return 0
        number = wanted(options.folder, options.unit_file)
        if number is None:
            return 0
        recover(options.folder, number, options.unit_file, options.environment_file)
        subprocess.run(["systemctl", "daemon-reload"], check=True, timeout=60)
    except (OSError, deployment.DeploymentError, subprocess.SubprocessError, give_way.GiveWayError) as error:
        print(f"octoserve.recover: {error}", file=sys.stderr)
        return 1
    print(f"a deploy was cut short; deployment {number}, whose gates passed, starts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
