"""Pages of docs/ with tables that are made of committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    """A committed result."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def between(name: str) -> re.Pattern[str]:
    """What stands in a page of docs/ between the markers of a name."""
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Write tables into a page, each between the markers of its name."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = between(name).sub(table.replace("\\", r"\\"), text)
    page.write_text(text, encoding="utf-8")
