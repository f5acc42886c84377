"""Text of a systemd unit's command line and of its environment file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def quote(word: str) -> str:
    """Quote one word of ExecStart= so that systemd hands on exactly it.

    Specifiers (%) and variables ($) are doubled, and the word is quoted where systemd would split it; see "Command
    lines" in systemd.service(5).
    """
    text = word.replace("%", "%%").replace("$", "$$")
    if text and not any(letter in text for letter in " \t\n\"'\\;"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Turn {"max-model-len": 4096} into ["--max-model-len=4096"], as vLLM's own parser reads them.

    True gives --name, False gives --no-name, None leaves the option out, mappings and lists become JSON.
    """
    words = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, (dict, list)):
            words.append(f"--{name}={json.dumps(value, separators=(',', ':'))}")
        else:
            words.append(f"--{name}={value}")
    return words


def environment(values: Mapping[str, Any]) -> str:
    """Text of an EnvironmentFile=, sorted by name; values are double-quoted, see systemd.exec(5).

    Raises ValueError for a value with a line break, which no environment file can hold.
    """
    lines = []
    for name in sorted(values):
        text = str(values[name])
        if "\n" in text:
            raise ValueError(f"environment variable {name} holds a line break; an environment file cannot")
        for letter in '\\"`$':
            text = text.replace(letter, "\\" + letter)
        lines.append(f'{name}="{text}"')
    return "\n".join(lines) + "\n"
