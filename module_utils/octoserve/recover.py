"""At boot: a deployment that was never proven makes way for the one whose gates passed last.

    python -m octoserve.recover /var/lib/octoserve/deployments/main --unit-file … --environment-file …

A power cut in the middle of a deploy leaves the unit of a deployment whose gates nobody asked, and nobody who would
bring the proven one back. Run by a unit of its own before the service starts; a boot with nothing to recover changes
nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import atomic, deployment, unit_file

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


def recover(folder: Path, unit: Path, environment: Path) -> None:
    """Write unit and environment of the proven deployment, then note the others as failed.

    Once more from the start where the power is cut again: the notes come last. Raises OSError or DeploymentError.
    """
    current = deployment.current(folder)
    if current is None:
        raise deployment.DeploymentError(f"{folder} has no deployment that passed")
    content = deployment.read(folder, current)
    before = environment.read_text() if environment.exists() else ""
    atomic.write_text(environment, environment_text(content, before), 0o600)
    atomic.write_text(unit, content["unit"])
    for number in deployment.newer(folder, current):
        deployment.set_state(folder, number, "failed")


def main(argv: Sequence[str] | None = None) -> int:
    """Recover where there is something to recover."""
    parser = argparse.ArgumentParser(prog="octoserve.recover", description="Start what was proven.")
    parser.add_argument("folder", type=Path, help="folder of the instance's deployments")
    parser.add_argument("--unit-file", type=Path, required=True, help="unit of the service")
    parser.add_argument("--environment-file", type=Path, required=True, help="its environment")
    options = parser.parse_args(argv)
    try:
        number = unproven(options.folder)
        if number is None:
            return 0
        recover(options.folder, options.unit_file, options.environment_file)
        subprocess.run(["systemctl", "daemon-reload"], check=True, timeout=60)
    except (OSError, deployment.DeploymentError, subprocess.SubprocessError) as error:
        print(f"octoserve.recover: {error}", file=sys.stderr)
        return 1
    current = deployment.current(options.folder)
    print(f"deployment {number} was never proven; deployment {current}, whose gates passed, starts instead")
    return 0


if __name__ == "__main__":
    sys.exit(main())
