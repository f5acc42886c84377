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


def redact(value: Any, secrets: Iterable[str] = (), private: Iterable[str] = ()) -> Any:
    """A copy of JSON values without secrets: named ones, known ones, and texts that look like one.

    Keys lose secrets, too, but not what is ``private``: a line of a prompt may be an ordinary word.
    Halves of surrogate pairs become U+FFFD: no file could hold them.
    """
    known, hidden = _longest_first(secrets), _longest_first([*secrets, *private])

    def clean(part: Any, name: str = "") -> Any:
        if isinstance(part, Mapping):
            return {blacken(str(key), known): clean(entry, str(key)) for key, entry in part.items()}
        if isinstance(part, (list, tuple)):
            return [clean(entry, name) for entry in part]
        if not isinstance(part, str):
            return part
        if part and SECRET_NAME.search(name):
            return REDACTED
        return blacken(part, hidden)

    return clean(value)


def blacken(text: str, secrets: Iterable[str]) -> str:
    """A text without these secrets, without what looks like one, and without halves of surrogate pairs."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return SECRET_TEXT.sub(REDACTED, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def private_texts(asked: Iterable[Mapping[str, Any]]) -> set[str]:
    """What the private cases of the gates' arguments ask, so that no message of a task brings it back.

    What a public case asks as well is no secret.
    """
    cases = [found for arguments in asked for found in _cases(arguments.get("suites"))]
    public = [text for case, private in cases if not private for text in _asked(case)]
    found = {text for case, private in cases if private for text in _asked(case) if len(text) >= MIN_SECRET_CHARS}
    return {text for text in found if not any(text in other for other in public)}


def _cases(value: Any, private: bool = False) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Each case of some suites and whether it is private: a case's own word counts before its suite's."""
    if isinstance(value, Mapping):
        private = bool(value.get("private", private))
        if "cases" in value:
            yield from _cases(value["cases"], private)
        else:
            yield value, private
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _cases(entry, private)


def _longest_first(secrets: Iterable[str]) -> list[str]:
    return sorted({secret for secret in secrets if secret}, key=len, reverse=True)


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
