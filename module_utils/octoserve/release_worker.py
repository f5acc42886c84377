"""The long job that makes a release; see job.py for the protocol and release.py for the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from . import job, patches, release, venv


def work(spec: dict[str, Any], _secrets: dict[str, Any], progress: job.Progress) -> dict[str, Any]:
    """Make the release that the spec describes; the result is its record."""
    recipe = release.Recipe(
        name=spec["name"],
        path=Path(spec["path"]),
        python=spec["python"],
        stack=Path(spec["stack"]),
        source=venv.Source(
            Path(spec["requirements"]),
            Path(spec["archive"]) if spec["archive"] else None,
            tuple(spec["extra_index_urls"]),
        ),
        imports=tuple(spec["imports"]),
        operators=tuple(spec.get("operators", ())),
        uv=spec["uv"],
    )
    try:
        return {"record": release.make(recipe, progress.phase)}
    except (OSError, release.ReleaseError, venv.VenvError, patches.PatchError) as error:
        raise job.WorkerError(str(error)) from error


if __name__ == "__main__":
    sys.exit(job.main(work))
