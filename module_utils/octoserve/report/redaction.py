"""Nothing secret in a report: by name, by value and by look."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SECRET_NAME = re.compile(r"(api_?key|token|password|passwd|secret|authorization)$", re.IGNORECASE)
SECRET_TEXT = re.compile(r"(?<=Bearer )\S+|\bhf_\w{16,}|\bsk-[\w-]{16,}|(?<=://)[^/\s@]+(?=@)")
REDACTED = "***"
#: Shorter ones would blacken ordinary words.
MIN_SECRET_CHARS = 6


def redact(value: Any, secrets: Iterable[str] = ()) -> Any:
    """A copy of JSON values without secrets: named ones, known ones, and texts that look like one.

    Halves of surrogate pairs become U+FFFD: no file could hold them.
    """
    known = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def clean(part: Any, name: str = "") -> Any:
        if isinstance(part, Mapping):
            return {clean(str(key)): clean(entry, str(key)) for key, entry in part.items()}
        if isinstance(part, (list, tuple)):
            return [clean(entry, name) for entry in part]
        if not isinstance(part, str):
            return part
        if part and SECRET_NAME.search(name):
            return REDACTED
        for secret in known:
            part = part.replace(secret, REDACTED)
        return SECRET_TEXT.sub(REDACTED, part).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    return clean(value)


def private_texts(arguments: Any) -> set[str]:
    """What the private cases anywhere in a gate's arguments ask, so that no message of a task brings it back."""
    return {text for case in _private(arguments) for text in _asked(case) if len(text) >= MIN_SECRET_CHARS}


def _private(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if value.get("private"):
            yield value
        else:
            for entry in value.values():
                yield from _private(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _private(entry)


def _asked(value: Any, name: str = "") -> Iterator[str]:
    """The prompts below a mapping, whole and by line; a message may quote either, or either as Python writes it."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _asked(entry, str(key))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _asked(entry, name)
    elif isinstance(value, str) and name in ("prompt", "content", "text", "system"):
        for text in (value.strip(), *map(str.strip, value.splitlines())):
            yield from (text, repr(text)[1:-1])
