"""What may go from a host's disk: deployments that nobody will go back to, and releases that only they used.

Models are never removed here: 402 GB are quickly gone and slowly back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import deployment

GOING = ".going"


@dataclass(frozen=True)
class Surplus:
    """Folders that may go, in the order in which they must, and folders of models that no kept deployment serves."""

    caches: tuple[Path, ...]
    releases: tuple[Path, ...]
    deployments: tuple[Path, ...]
    unused_models: tuple[Path, ...]

    @property
    def folders(self) -> tuple[Path, ...]:
        """All that may go. Records last: they are what tells, after a power cut, that a release is surplus."""
        return (*self.caches, *self.releases, *self.deployments)


def kept(folder: Path, keep: int) -> set[int]:
    """Numbers of an instance's deployments that stay: the last ``keep`` that passed, current, and whatever is newer.

    Newer than ``current`` are those whose evidence somebody still wants. Raises DeploymentError.
    """
    numbers, current = deployment.numbers(folder), deployment.current(folder)
    if current is None:
        return set(numbers)
    passed = [number for number in numbers if deployment.state(folder, number) == "passed" and number <= current]
    return {number for number in numbers if number >= current} | set(passed[-keep:]) | {current}


@dataclass(frozen=True)
class Places:
    """Where an instance has its things."""

    state: Path
    models: Path
    releases: Path
    cache: Path
    instance: str

    @property
    def deployments(self) -> Path:
        """Records of the instance."""
        return self.state / "deployments" / self.instance


def surplus(places: Places, keep: int) -> Surplus:
    """What may go of an instance; of its deployments that passed, ``keep`` stay. Raises DeploymentError."""
    folder = places.deployments
    stay = kept(folder, max(keep, 1))
    go = [number for number in deployment.numbers(folder) if number not in stay]
    others = [path for path in folder.parent.glob("*") if path.name != places.instance]
    needed = [(folder, stay), *((path, set(deployment.numbers(path))) for path in others)]
    contents = [deployment.read(where, number) for where, numbers in needed for number in sorted(numbers)]
    in_use = {content.get("release") for content in contents}
    # Only what a deployment used: a release that was installed ahead of its deployment has none yet.
    unused = sorted({str(deployment.read(folder, number).get("release")) for number in go} - in_use)
    served = {(content.get("model_files") or {}).get("folder") for content in contents}
    served |= {str(Path(content["model"]).parent) for content in contents if "model" in content}
    models = [path for path in sorted(places.models.glob("*")) if path.is_dir() and str(path) not in served]
    return Surplus(
        caches=_there(places.cache / name for name in unused),
        releases=_there(places.releases / name for name in unused),
        deployments=tuple(folder / deployment.name_of(number) for number in go),
        unused_models=tuple(models) if contents else (),
    )


def _there(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(path for path in paths if path.is_dir())


def leftovers(places: Places) -> list[Path]:
    """What an earlier run renamed to remove it, and did not come to the end."""
    folders = (places.cache, places.releases, places.deployments)
    return [path for folder in folders for path in sorted(folder.glob(f".*{GOING}"))]


def remove(folders: Iterable[Path]) -> None:
    """Remove folders. Each is renamed first, so that none is ever half there under its name. Raises OSError."""
    for path in folders:
        going = path if path.name.endswith(GOING) else path.with_name(f".{path.name}{GOING}")
        if going != path:
            path.rename(going)
        shutil.rmtree(going)
