"""Filter: which files of a model's sources are its GGUF."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

sys.path.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from octoserve.fetch import FetchError, wanted_files
from octoserve.splits import SPLIT_NAME


def gguf_splits(sources: Sequence[Mapping[str, Any]], folder: str) -> dict[str, Any]:
    """Return {prefix, names, others, splits: [{path, sha256}]} of the one GGUF model among the files, splits in order.

    `path` is where a file lies once it is fetched into the folder, `others` names the files beside the model.

    Raises AnsibleFilterError where there is none, more than one, or where a split is not listed.
    """
    try:
        wanted = wanted_files(sources)
        files = [item for item in wanted if item.name.endswith(".gguf")]
    except (FetchError, KeyError, TypeError) as error:
        raise AnsibleFilterError(f"the model's sources are not usable: {error}") from error
    matches = {item.name: SPLIT_NAME.match(item.name) for item in files}
    prefixes = {match["prefix"] if match else name[: -len(".gguf")] for name, match in matches.items()}
    if len(prefixes) != 1:
        raise AnsibleFilterError(
            f"found {len(prefixes)} GGUF models in the model's sources, wanted one: {sorted(prefixes)}"
        )
    files.sort(key=lambda item: item.name)
    numbers = [(int(match["number"]), int(match["count"])) for match in map(SPLIT_NAME.match, matches) if match]
    if numbers and sorted(numbers) != [(number, len(files)) for number in range(1, len(files) + 1)]:
        raise AnsibleFilterError(_not_whole(min(prefixes), sorted(matches), max(count for _, count in numbers)))
    return {
        "prefix": prefixes.pop(),
        "names": [item.name for item in files],
        "others": sorted({item.name for item in wanted} - {item.name for item in files}),
        "splits": [{"path": f"{folder}/{item.name}", "sha256": item.sha256} for item in files],
    }


def _not_whole(prefix: str, found: list[str], count: int) -> str:
    wanted = [f"{prefix}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = ", ".join(name for name in wanted if name not in found) or "none"
    surplus = ", ".join(name for name in found if name not in wanted) or "none"
    return (
        f"found {len(found)} splits in the model's sources, wanted {count}; missing: {missing}; not of them: {surplus}"
    )


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Return them by name."""
        return {"gguf_splits": gguf_splits}
