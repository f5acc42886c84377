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
# What says of all that follows in its clause that it is not so: "It is false that ...".
FALSE = frozenset(["false", "untrue", "incorrect", "wrong", "myth"])
# After a negation, the same: "It is not true that ...".
TRUE = frozenset(["true", "correct", "right"])
# "every city except Paris"
EXCEPTIONS = frozenset(["except", "excluding"])
# A negation does not reach across these: "not Lyon but Paris", "is not Lyon, it is Paris".
CLAUSE_ENDS = frozenset([".", ",", ";", ":", "!", "?", "\u3002", "\u3001", "but", "rather", "instead"])
# Before a number, it makes another number of it: -42, 1/42.
SIGNS = "-\u2212\u2013/"
COPULAS = frozenset(["is", "was", "are", "were"])

# Ends of lines, brackets and dashes between blanks part clauses, too: "4 (no tool needed)".
PARTING = re.compile(r"\s*\n\s*|\s*[\u2014]\s*|\s[\u2013-]\s|[()]")

# Of _emphasis_ and __bold__; an underscore within a word stays.
MARKUP = re.compile(r"(?<!\w)_+|_+(?!\w)")
GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")

# Thai, Lao, Burmese and Khmer, kana, Chinese characters, Hangul: no blanks between words, or endings that join them.
# Each character is a token, so that a form is found wherever it stands.
JOINED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff"
TOKEN = re.compile(rf"[{JOINED}]|[^\W{JOINED}]+(?:[.,]\d+)*(?:['\u2019]\w+)?|[.,;:!?\u3002\u3001]")


def tokens(text: str) -> list[str]:
    """Words and clause punctuation in one spelling: NFKC, casefolded, straight apostrophes, 4817 for 4,817."""
    return [_ungrouped(token) for token in TOKEN.findall(_spelled(text))]


def _spelled(text: str) -> str:
    return MARKUP.sub("", unicodedata.normalize("NFKC", text).replace("\u2019", "'").casefold())


def _ungrouped(token: str) -> str:
    return token.replace(",", "") if GROUPED.fullmatch(token) else token


def words(text: str) -> list[str]:
    """The words of a text, in one spelling."""
    return [token for token in tokens(text) if token not in CLAUSE_ENDS or token.isalpha()]


def find_form(text: Sequence[str], form: Sequence[str]) -> list[int]:
    """Positions at which the tokens ``form`` stand in the tokens ``text``."""
    width = len(form)
    return [at for at in range(len(text) - width + 1) if list(text[at : at + width]) == list(form)]


def is_negated(text: Sequence[str], at: int, width: int) -> bool:
    """Whether ``text[at:at + width]`` is denied: "is not Paris", "Paris isn't", "Paris? No", "false that ... Paris"."""
    if _is_called_false(text, at) or (at and text[at - 1] in EXCEPTIONS):
        return True
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
    if first == "?":
        return second in NEGATIONS
    return first in NEGATIONS and first != "not"


def _is_called_false(text: Sequence[str], at: int) -> bool:
    """Whether the clause that leads to a place says that what follows is not so, however far before it."""
    following = ""
    for index in range(at - 1, -1, -1):
        token = text[index]
        if token in CLAUSE_ENDS:
            return False
        if token in FALSE:
            return not any(word in NEGATIONS for word in text[max(0, index - 2) : index])
        if token in NEGATIONS and following in TRUE:
            return True
        following = token
    return False


def states(text: str, form: str) -> bool:
    """Whether a text says a form, as whole words and not denied; ``re:`` marks a regular expression.

    A number with a sign or a slash before it is another number, and "42 or 43" says neither.
    """
    if form.startswith("re:"):
        said = tokens(_parted(text))
        found = re.finditer(form[3:], text, re.IGNORECASE)
        return any(
            not is_negated(said, len(tokens(_parted(text[: one.start()]))), len(tokens(one.group()))) for one in found
        )
    said, wanted = tokens(_parted(text)), tokens(form)
    if len(wanted) == 1 and wanted[0][0].isdigit():
        said = _without_signed(_parted(text))
        return any(not is_negated(said, at, 1) and not _is_one_of_two(said, at) for at in find_form(said, wanted))
    return any(not is_negated(said, at, len(wanted)) for at in find_form(said, wanted))


def _parted(text: str) -> str:
    return PARTING.sub(" ; ", text)


def _is_one_of_two(text: Sequence[str], at: int) -> bool:
    """Whether a number stands beside another one: "42 or 43"."""
    neighbours = (text[at - 2 : at] if at >= 2 else [], list(reversed(text[at + 1 : at + 3])))
    return any(len(two) == 2 and two[1] == "or" and two[0][0].isdigit() and two[0] != text[at] for two in neighbours)


def _without_signed(text: str) -> list[str]:
    """The tokens of a text; of a number with a sign, the sign is part of it."""
    spelled = _spelled(text)
    return [
        spelled[max(0, one.start() - 1) : one.end()]
        if one.group()[0].isdigit() and one.start() and spelled[one.start() - 1] in SIGNS
        else _ungrouped(one.group())
        for one in TOKEN.finditer(spelled)
    ]


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
