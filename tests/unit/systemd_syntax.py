"""A small reading of unit files by systemd's own rules, to hold what the project writes against."""

from __future__ import annotations

import ast
import re

WHITESPACE = " \t\n\r"


def exec_start(unit: str) -> list[str]:
    """The arguments of the one ExecStart= in a unit, by the rules of systemd.syntax(7) and systemd.service(5)."""
    joined = ""
    for line in re.split("[\n\r]", unit):
        if line.strip(WHITESPACE)[:1] in {"#", ";"}:
            continue  # a comment, also between the lines of a continued one
        joined += line[:-1] + " " if line.endswith("\\") else line + "\n"
    (command,) = (line.partition("=")[2] for line in joined.split("\n") if line.startswith("ExecStart="))
    words = [unquoted(raw) for raw in split(command) if raw != ";"]
    return [variables(specifiers(word)) for word in words]


def split(command: str) -> list[str]:
    """Words in the form in which they are written, quotes and escapes included."""
    words, word, quote, position = [], "", "", 0
    while position < len(command):
        letter = command[position]
        if letter == "\\":
            word += command[position : position + 2]
            position += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in WHITESPACE:
            words += [word] if word else []
            word = ""
            position += 1
            continue
        word += letter
        position += 1
    assert not quote, f"unbalanced quotes: {command!r}"
    return words + ([word] if word else [])


def unquoted(raw: str) -> str:
    """Quotes removed and C-style escapes read."""
    out, quote, position = "", "", 0
    while position < len(raw):
        letter = raw[position]
        if letter == "\\":
            escape = re.compile(r"\\(x[0-9a-f]{2}|[abfnrtv\\\"'])").match(raw, position)
            assert escape, f"an escape that systemd does not know: {raw!r}"
            out += str(ast.literal_eval(f'"{escape[0]}"'))
            position = escape.end()
            continue
        if letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote = letter
        else:
            out += letter
        position += 1
    return out


def specifiers(word: str) -> str:
    assert not re.search("%", word.replace("%%", "")), f"a specifier: {word!r}"
    return word.replace("%%", "%")


def variables(word: str) -> str:
    assert not re.search(r"\$", word.replace("$$", "")), f"a variable: {word!r}"
    return word.replace("$$", "$")
