"""What an answer must be: checks of text, each made from plain data and free of I/O.

A check takes the text of an answer and returns None, or the reason why it fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from . import prose
from .document import integer, known
from .statements import expression, forms, mentions, states

Check = Callable[[str], "str | None"]

TEMPLATE_TOKEN = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s]{1,40}[|\uff5c]>|<[/]?s>|<(?:sop|eos|bos|unk|pad)>|\[(?:gMASK|/?INST|TOOL_CALLS)\]"
    r"|<(?:start|end)_of_turn>|</?(?:think|answer|tool_call|tool_response|arg_key|arg_value)>"
)
# Controls, and halves of surrogate pairs: no UTF-8 text holds them.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL | re.IGNORECASE)


def well_formed(text: str) -> str | None:
    """What no answer may be: empty, broken UTF-8, control characters, tokens of the chat template."""
    if not text.strip():
        return "the answer is empty"
    if "\ufffd" in text:
        return f"broken UTF-8 (U+FFFD) at character {text.index(chr(0xFFFD))}"
    if found := CONTROL.search(text):
        return f"control character {found.group()!r} at character {found.start()}"
    if found := TEMPLATE_TOKEN.search(text):
        return f"token of the chat template in the text: {found.group()}"
    return None


def accept(value: Any) -> Check:
    """At least one of the forms is said, and not denied."""
    accepted = forms(value)

    def check(text: str) -> str | None:
        if any(states(text, form) for form in accepted):
            return None
        denied = [form for form in accepted if mentions(text, form)]
        if denied:
            return f"the answer denies {denied[0]!r}"
        return "the answer holds none of: " + ", ".join(map(repr, accepted))

    return check


def reject(value: Any) -> Check:
    """None of the forms may occur."""
    rejected = forms(value)

    def check(text: str) -> str | None:
        found = [form for form in rejected if mentions(text, form)]
        return f"the answer holds {found[0]!r}" if found else None

    return check


def count(bounds: Any) -> Check:
    """The numbers ``from`` to ``to``, each on a line of its own, and nothing else."""
    first, last = (integer(bounds, key) for key in ("from", "to"))
    wanted = [str(number) for number in range(first, last + 1)]
    known(bounds, ("from", "to"))
    if not wanted:
        raise ValueError(f"count: nothing lies from {first} to {last}")

    def check(text: str) -> str | None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        for at, (line, number) in enumerate(zip(lines, wanted)):
            if line != number:
                return f"line {at + 1}: found {line[:40]!r}, wanted {number!r}"
        if len(lines) != len(wanted):
            return f"found {len(lines)} lines, wanted {len(wanted)}"
        return None

    return check


def lines(wanted: Any) -> Check:
    """So many lines (``number``) that are not empty, each like a regular expression (``each``, optional)."""
    known(wanted, ("number", "each"))
    number, pattern = integer(wanted, "number"), expression(str(wanted.get("each", "")))

    def check(text: str) -> str | None:
        found = [line.strip() for line in text.splitlines() if line.strip()]
        if len(found) != number:
            return f"found {len(found)} lines, wanted {number}"
        unlike = [line for line in found if not pattern.search(line)]
        return f"the line {unlike[0][:80]!r} is not like {pattern.pattern!r}" if unlike else None

    return check


def json_object(wanted: Any) -> Check:
    """One JSON object, alone or in a code fence, with these keys and no others: of each the accepted values.

    Texts are compared without regard to case; a number is none that is written as a text.
    """
    if not isinstance(wanted, Mapping) or not all(isinstance(values, list) and values for values in wanted.values()):
        raise ValueError(f"json: found {wanted!r}, wanted of each key a list of accepted values")
    accepted = {str(key): [_plain(value) for value in values] for key, values in wanted.items()}

    def check(text: str) -> str | None:
        fenced = FENCE.fullmatch(text.strip())
        try:
            found = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError) as error:
            return f"no JSON: {error}"
        if not isinstance(found, dict) or set(found) != set(accepted):
            return f"found {text.strip()[:80]!r}, wanted an object with {', '.join(map(repr, accepted))}"
        wrong = [key for key, value in found.items() if _plain(value) not in accepted[key]]
        return f"{wrong[0]!r} is {found[wrong[0]]!r}" if wrong else None

    return check


CHECKS: Mapping[str, Callable[[Any], Check]] = {
    "accept": accept,
    "reject": reject,
    "count": count,
    "lines": lines,
    "json": json_object,
    "coherent": prose.coherent,
}


def _plain(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else value
