"""Guard before start: what starts is what was deployed and proven.

    python -m octoserve.guard_deployment /var/lib/octoserve/deployments/main --releases /opt/octoserve/releases \\
        --unit octoserve-main.service

Of the deployment that the unit is of, the files that were patched have the recorded hashes, and every file of the model
is the one that was verified: same size, time and inode as in its receipt, same SHA-256 as in the record.
Meant for a unit's ExecStartPre. Ends 1 with one line for each fault; starting again is useless before somebody acted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import deployment, patches, release
from .receipt import Receipt

SITE_PACKAGES = "lib/python3*/site-packages"


def faults(folder: Path, releases: Path, number: int | None = None) -> Iterator[str]:
    """What of a deployment is not as recorded; by default of the newest in service.

    Raises DeploymentError or ReleaseError.
    """
    number = number or deployment.running(folder)
    if number is None:
        raise deployment.DeploymentError(f"{folder} holds no deployment that is in service; run site.yml")
    content = deployment.read(folder, number)
    yield from _of_release(releases / str(content["release"]))
    if content.get("model_files"):  # not in records of the first versions
        yield from _of_model(content["model_files"])


def _of_release(path: Path) -> Iterator[str]:
    record = release.read_record(path)
    found = sorted(path.glob(SITE_PACKAGES))
    if not record or not found:
        yield f"release {path} is not complete; run site.yml --tags release"
        return
    for fault in patches.verify(record["files"], found[0]):
        yield f"{found[0]}/{fault}; undo the edit, or remove {path} and run site.yml"


def _of_model(files: Mapping[str, Any]) -> Iterator[str]:
    folder = Path(files["folder"])
    receipt = Receipt(folder)
    for name, sha256 in sorted(files["sha256"].items()):
        entry = receipt.valid(name)
        if entry is None or entry.sha256 != sha256:
            found = "changed since it was verified" if (folder / name).exists() else "is not there"
            yield f"{folder / name} {found}; run site.yml, which verifies it and fetches what is wrong"


def main(argv: Sequence[str] | None = None) -> int:
    """Check, and say what is wrong."""
    parser = argparse.ArgumentParser(prog="octoserve.guard_deployment", description="Check what is to run.")
    parser.add_argument("folder", type=Path, help="folder of the instance's deployments")
    parser.add_argument("--releases", type=Path, required=True, help="folder of the releases")
    parser.add_argument("--unit", help="unit that is to start; units of the first versions do not name themselves")
    options = parser.parse_args(argv)
    try:
        number = options.unit and deployment.started(options.folder, deployment.UNITS / options.unit)
        found = list(faults(options.folder, options.releases, number))
    except (deployment.DeploymentError, release.ReleaseError) as error:
        found = [str(error)]
    for fault in found:
        print(f"octoserve.guard_deployment: {fault}", file=sys.stderr)
    if not found:
        print("release and model are as recorded")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
