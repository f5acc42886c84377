"""Text of a systemd unit's command line and of its environment file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def quote(word: str) -> str:
    """Quote one word of ExecStart= so that systemd hands on exactly it.

    Specifiers (%) and variables ($) are doubled, and the word is quoted where systemd would split it or, on a line of
    its own, take it for a comment; see "Command lines" in systemd.service(5) and systemd.syntax(7).
    """
    text = word.replace("%", "%%").replace("$", "$$")
    if text and not any(letter in " \"'\\;#" or _is_control(letter) for letter in text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\x{ord(letter):02x}" if _is_control(letter) else letter for letter in text) + '"'


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Turn {"max-model-len": 4096} into ["--max-model-len=4096"], as vLLM's own parser reads them.

    True gives --name, False gives --no-name (leave out an option that has no such form), None leaves the option out,
    a mapping becomes JSON, a list several words.
    """
    words = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            words.append(f"--{name}={json.dumps(value, separators=(',', ':'))}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={value}")
    return words


def environment(values: Mapping[str, Any]) -> str:
    """Text of an EnvironmentFile=, sorted by name; values are double-quoted, see systemd.exec(5).

    Raises ValueError for what systemd would leave out with no more than a line in its journal: a name that is none, a
    value with control characters; and for values that are neither text nor numbers.
    """
    lines = []
    for name in sorted(values):
        value = values[name]
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable: wanted letters, digits and _")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError(f"environment variable {name} is {value!r}, wanted text or a number")
        text = str(value)
        if any(_is_control(letter) and letter != "\t" for letter in text):
            raise ValueError(f"environment variable {name} holds a line break or another control character")
        for letter in '\\"`$':
            text = text.replace(letter, "\\" + letter)
        lines.append(f'{name}="{text}"\n')
    return "".join(lines)


def _is_control(letter: str) -> bool:
    return letter < " " or letter == "\x7f"
