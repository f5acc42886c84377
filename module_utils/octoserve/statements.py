"""What a text says: words in one spelling, the forms that it states, and the ones that it denies."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

# A negation this many words before a form denies it: "I do not think it is Paris".
NEGATION_REACH = 5
_NEGATIONS = """
    not no never neither nor cannot can't won't don't doesn't didn't isn't aren't wasn't weren't
"""
NEGATIONS = frozenset(_NEGATIONS.split())
# "There is no doubt that Paris", "not only Paris".
AFFIRMATIONS = frozenset(["doubt", "question", "only", "just"])
# A negation does not reach across these: "not Lyon but Paris", "is not Lyon, it is Paris".
CLAUSE_ENDS = frozenset([".", ",", ";", ":", "!", "?", "but", "rather", "instead"])
COPULAS = frozenset(["is", "was", "are", "were"])

TOKEN = re.compile(r"\w+(?:[.,]\d+)*(?:['\u2019]\w+)?|[.,;:!?]")


def tokens(text: str) -> list[str]:
    """Words and clause punctuation in one spelling: NFKC, casefolded, straight apostrophes."""
    return TOKEN.findall(unicodedata.normalize("NFKC", text).replace("\u2019", "'").casefold())


def words(text: str) -> list[str]:
    """The words of a text, in one spelling."""
    return [token for token in tokens(text) if token not in CLAUSE_ENDS or token.isalpha()]


def find_form(text: Sequence[str], form: Sequence[str]) -> list[int]:
    """Positions at which the tokens ``form`` stand in the tokens ``text``."""
    width = len(form)
    return [at for at in range(len(text) - width + 1) if list(text[at : at + width]) == list(form)]


def is_negated(text: Sequence[str], at: int, width: int) -> bool:
    """Whether ``text[at:at + width]`` is denied: "is not Paris", "Paris is not", "Paris isn't"."""
    following = text[at] if at < len(text) else ""
    for token in reversed(text[max(0, at - NEGATION_REACH) : at]):
        if token in CLAUSE_ENDS:
            break
        if token in NEGATIONS and following not in AFFIRMATIONS:
            return True
        following = token
    first, second, third = [*text[at + width : at + width + 3], "", "", ""][:3]
    if first in COPULAS:
        return second in NEGATIONS and third not in AFFIRMATIONS
    return first in NEGATIONS and first != "not"


def states(text: str, form: str) -> bool:
    """Whether a text says a form, as whole words and not denied; ``re:`` marks a regular expression."""
    if form.startswith("re:"):
        return re.search(form[3:], text, re.IGNORECASE) is not None
    said, wanted = tokens(text), tokens(form)
    return any(not is_negated(said, at, len(wanted)) for at in find_form(said, wanted))


def mentions(text: str, form: str) -> bool:
    """Whether a text holds a form at all, denied or not."""
    if form.startswith("re:"):
        return re.search(form[3:], text, re.IGNORECASE) is not None
    return bool(find_form(tokens(text), tokens(form)))


def forms(value: Any) -> list[str]:
    """A list of texts as a suite holds it; numbers of YAML are texts as well.

    Raises ValueError, also for a broken expression.
    """
    if not isinstance(value, list) or not value or any(isinstance(v, (dict, list)) for v in value):
        raise ValueError(f"found {value!r}, wanted a list of texts")
    found = [str(form) for form in value]
    for form in found:
        if form.startswith("re:"):
            expression(form[3:])
        elif not words(form):
            raise ValueError(f"{form!r} holds no word")
    return found


def expression(text: str) -> re.Pattern[str]:
    """A regular expression. Raises ValueError where it is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
