"""A small installed stack and a series for it, for the tests of patches."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml
from octoserve import patches, unified_diff

RELEASED: dict[str, str | None] = {
    "engine/core.py": "".join(f"step_{number} = {number}\n" for number in range(1, 41)),
    "engine/util.py": "def half(x):\n    return x / 3\n",
    "engine/new.py": None,
    "plugin/load.py": "names = set()\n",
}
STEPS: tuple[tuple[str, str, dict[str, str | None]], ...] = (
    ("engine", "Halve by two\nThree was a slip.\n\nSeen in production.", {
        "engine/util.py": "def half(x):\n    return x / 2\n",
        "engine/new.py": "made = True\n",
    }),
    ("engine", "Count step 30 right", {
        "engine/core.py": (RELEASED["engine/core.py"] or "").replace("= 30\n", "= 31\n"),
        "engine/new.py": "made = True\nkept = True\n",
    }),
    ("plugin", "Keep the names in order", {"plugin/load.py": "names = []\n"}),
)  # fmt: skip
VERSIONS = {"engine": "1.2.0", "plugin": "0.5"}


def install(site: Path, *, name: str = "engine", version: str = "1.2.0") -> Path:
    """The released files and their ``*.dist-info``."""
    for path, text in RELEASED.items():
        if text is not None:
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
    for found, number in ((name, version), ("plugin", VERSIONS["plugin"])):
        info = site / f"{found}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {found}\nVersion: {number}\n")
    return site


def entries() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Entries of ``series.yml`` and the texts of the patches."""
    state = dict(RELEASED)
    listed: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for number, (distribution, description, changes) in enumerate(STEPS, 1):
        first, *rest = description.split("\n")
        name = f"{number:04d}-{first.lower().replace(' ', '-')}.patch"
        body = "".join(f" {line or '.'}\n" for line in rest)
        texts[name] = textwrap.dedent(
            f"""\
            Description: {first}
            {{body}}Origin: vendor
            Bug: https://github.com/example/engine/issues/{number}
            Last-Update: 2026-11-30
            Applies-To: {distribution} {VERSIONS[distribution]}
            Proof: cpu
            ---
            """
        ).format(body=body) + "".join(
            unified_diff.make(path, state[path], text) for path, text in sorted(changes.items())
        )
        files = {
            path: {"before": patches.sha256(state[path]), "after": patches.sha256(text)}
            for path, text in sorted(changes.items())
        }
        version = VERSIONS[distribution]
        listed.append({"file": name, "distribution": distribution, "version": version, "proof": "cpu", "files": files})
        state.update(changes)
    return listed, texts


def patched() -> dict[str, str | None]:
    """Every file after the series."""
    state = dict(RELEASED)
    for _, _, changes in STEPS:
        state.update(changes)
    return state


def write_series(folder: Path) -> Path:
    """The stack's folder as a contributor would have it."""
    listed, texts = entries()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "series.yml").write_text(yaml.safe_dump({"builds": {"engine": ["engine-cpu"]}, "patches": listed}))
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder
