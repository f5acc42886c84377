"""What an answer must be: checks of text, each made from plain data and free of I/O.

A check takes the text of an answer and returns None, or the reason why it fails.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Check = Callable[[str], "str | None"]

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

# A repetition of 1 to 64 words that comes four times in a row and fills a line is a loop, not a style.
LOOP_TIMES = 4
LOOP_MAX_WORDS = 64
LOOP_MIN_WORDS = 8
# Healthy prose repeats under a tenth of its 4-grams, text that circles over a paragraph nearly all.
NGRAM = 4
MAX_REPEATED_NGRAMS = 0.5
# Formulas bring a few Greek letters into healthy text.
MAX_FOREIGN_LETTERS = 0.03
# Longest run of letters and digits in healthy prose, with room: "adenosintriphosphate" has 20.
MAX_WORD_CHARS = 40
# About 40 % of the words of English prose are function words; of random vocabulary nearly none.
MIN_FUNCTION_WORDS = 0.15
_ENGLISH = """
    a an the this that these those it its they them their who which can will is are was were be been as
    of and or but not to in into on at by for from with through when where how then than also such
"""
FUNCTION_WORDS = {"en": frozenset(_ENGLISH.split())}
TEMPLATE_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>|<[/]?s>|\[(?:gMASK|INST)\]|<sop>|</?think>")
# Controls, and halves of surrogate pairs: no UTF-8 text holds them.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
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


def find_loop(text: Sequence[str]) -> str | None:
    """The words that a text repeats again and again, or None.

    Looks for a block repeated at once (a run of one period), then for a text that circles over longer parts
    (share of repeated 4-grams).
    """
    for period in range(1, min(LOOP_MAX_WORDS, len(text) // LOOP_TIMES) + 1):
        needed = max(period * (LOOP_TIMES - 1), LOOP_MIN_WORDS - period)
        run = 0
        for at in range(period, len(text)):
            run = run + 1 if text[at] == text[at - period] else 0
            if run >= needed:
                return " ".join(text[at - period + 1 : at + 1])
    grams = Counter(tuple(text[at : at + NGRAM]) for at in range(len(text) - NGRAM + 1))
    total = sum(grams.values())
    if total >= LOOP_MAX_WORDS // 2 and 1 - len(grams) / total > MAX_REPEATED_NGRAMS:
        return " ".join(grams.most_common(1)[0][0])
    return None


def script(letter: str) -> str:
    """The script of a letter in lower case ("latin", "cyrillic", "cjk"), from its Unicode name."""
    return unicodedata.name(letter, "unknown").split()[0].split("-")[0].lower()


def foreign_letters(text: str, scripts: Sequence[str]) -> dict[str, int]:
    """How many letters of which other scripts a text holds."""
    found = Counter(script(letter) for letter in text if letter.isalpha())
    return {name: n for name, n in found.items() if name not in scripts}


def accept(forms: Any) -> Check:
    """At least one of the forms is said, and not denied."""
    accepted = _forms(forms)

    def check(text: str) -> str | None:
        if any(states(text, form) for form in accepted):
            return None
        denied = [form for form in accepted if mentions(text, form)]
        if denied:
            return f"the answer denies {denied[0]!r}"
        return "the answer holds none of: " + ", ".join(map(repr, accepted))

    return check


def reject(forms: Any) -> Check:
    """None of the forms may occur."""
    rejected = _forms(forms)

    def check(text: str) -> str | None:
        found = [form for form in rejected if mentions(text, form)]
        return f"the answer holds {found[0]!r}" if found else None

    return check


def count(bounds: Any) -> Check:
    """The numbers ``from`` to ``to``, each on a line of its own, and nothing else."""
    first, last = (_integer(bounds, key) for key in ("from", "to"))
    wanted = [str(number) for number in range(first, last + 1)]
    _known(bounds, ("from", "to"))
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


def coherent(limits: Any) -> Check:
    """Prose: long enough, on its subject, in its script and language, without loops.

    ``min_words``; ``terms``: of each list of forms at least one occurs; ``scripts``: allowed scripts;
    ``language``: whose function words are counted.
    """
    _known(limits, ("min_words", "terms", "scripts", "language"))
    min_words = _integer(limits, "min_words")
    if min_words < 1:
        raise ValueError("min_words: wanted at least 1: an empty text is not coherent")
    terms = [_forms(forms) for forms in limits.get("terms", [])]
    scripts = _forms(limits.get("scripts", ["latin"]))
    language = limits.get("language", "en")
    if language not in FUNCTION_WORDS:
        raise ValueError(f"coherent: language {language!r} is not known; known: {', '.join(FUNCTION_WORDS)}")

    def faults(text: str) -> Iterator[str]:
        said = words(text)
        if len(said) < min_words:
            yield f"{len(said)} words, wanted at least {min_words}"
        for forms in terms:
            if not any(mentions(text, form) for form in forms):
                yield "not on the subject: found none of " + ", ".join(map(repr, forms))
        if loop := find_loop(said):
            yield f"the answer repeats itself: {loop[:80]!r}"
        letters = sum(letter.isalpha() for letter in text)
        foreign = foreign_letters(text, scripts)
        if sum(foreign.values()) > MAX_FOREIGN_LETTERS * letters:
            yield f"drift into other scripts: {foreign} of {letters} letters"
        longest = max(said, key=len)
        if len(longest) > MAX_WORD_CHARS:
            yield f"a word of {len(longest)} characters: {longest[:MAX_WORD_CHARS]}"
        share = sum(word in FUNCTION_WORDS[language] for word in said) / len(said)
        if share < MIN_FUNCTION_WORDS:
            yield f"no prose: {share:.0%} function words ({language}), wanted {MIN_FUNCTION_WORDS:.0%}"

    return lambda text: next(faults(text), None)


CHECKS: Mapping[str, Callable[[Any], Check]] = {
    "accept": accept,
    "reject": reject,
    "count": count,
    "coherent": coherent,
}


def _forms(value: Any) -> list[str]:
    """A list of texts; numbers of YAML are texts as well. Raises ValueError, also for a broken expression."""
    if not isinstance(value, list) or not value or any(isinstance(v, (dict, list)) for v in value):
        raise ValueError(f"found {value!r}, wanted a list of texts")
    forms = [str(form) for form in value]
    for form in forms:
        if form.startswith("re:"):
            try:
                re.compile(form[3:])
            except re.error as error:
                raise ValueError(f"{form!r} is no regular expression: {error}") from error
        elif not words(form):
            raise ValueError(f"{form!r} holds no word")
    return forms


def _integer(mapping: Any, key: str) -> int:
    value = mapping.get(key) if isinstance(mapping, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key}: found {value!r}, wanted a whole number")
    return value


def _known(mapping: Mapping[str, Any], keys: Sequence[str]) -> None:
    unknown = sorted(set(mapping) - set(keys))
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(keys)}")
