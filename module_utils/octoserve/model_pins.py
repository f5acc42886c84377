"""Files of a model that deployments rely on: one that is replaced by another can never be gone back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from . import deployment
from .fetch import Wanted
from .receipt import Receipt


def conflicts(state_dir: Path, folder: Path, wanted: Sequence[Wanted]) -> list[str]:
    """Deployments whose gates passed with other files in a model's folder than are wanted now, each in a line.

    A wanted file without a digest of its own differs from nothing. Raises DeploymentError.
    """
    digests = {item.name: item.sha256 for item in wanted if item.sha256}
    receipt = Receipt(folder)
    found = []
    for instance in sorted(path for path in (state_dir / "deployments").glob("*") if path.is_dir()):
        for number in deployment.numbers(instance):
            if deployment.state(instance, number) == "passed":
                files = deployment.read(instance, number).get("model_files") or {}
                if files.get("folder") == str(folder):
                    served = dict(_served(files.get("sha256") or {}, receipt))
                    found += [
                        f"deployment {number} of instance {instance.name} was proven with {name} of sha256 "
                        f"{served[name][:12]}…, wanted now is {digest[:12]}…"
                        for name, digest in digests.items()
                        if served.get(name, digest) != digest
                    ]
    return found


def _served(sha256: dict[str, str], receipt: Receipt) -> Iterator[tuple[str, str]]:
    """Digest by name of the files that a record names, and of the splits that its merged file was made from."""
    for name, digest in sha256.items():
        yield name, digest
        entry = receipt.valid(name)
        if entry and entry.sha256 == digest:
            yield from entry.made_from.items()
