"""Whether a text is prose: on its subject, in its script and language, without loops, to its very end."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .document import integer, known
from .statements import forms, mentions, words

# A repetition of 1 to 64 words that comes four times in a row and fills a line is a loop, not a style.
LOOP_TIMES = 4
LOOP_MAX_WORDS = 64
LOOP_MIN_WORDS = 8
# Healthy prose repeats under a tenth of its 4-grams, text that circles over a paragraph nearly all.
NGRAM = 4
MAX_REPEATED_NGRAMS = 0.5
# No healthy text says so many words in a row, the same, a third time; one that circles over a paragraph does.
PASSAGE_WORDS, PASSAGE_TIMES = 40, 3
# The same few characters again and again, which are no words: "!!!!", "| | | |". Ten times and so many characters are a
# loop, of letters and digits ("hahaha") more; a rule, a row of dots or of blanks may fill a line.
STUTTER = re.compile(r"(.{1,8}?)\1{9,}", re.DOTALL)
MAX_STUTTER, MAX_STUTTER_OF_LETTERS, MAX_RULE = 40, 120, 120
RULE = frozenset(" -=_*~+|:#.")
# Signs, emojis and invisible characters of a stretch: of JSON and tables under half.
SIGN_WINDOW, MAX_SIGNS = 240, 0.8
# Formulas bring Greek letters and signs into healthy text, of which so large a share may be.
FORMULA = frozenset(
    ["greek", "mathematical", "micro", "ohm", "kelvin", "angstrom", "modifier", "superscript", "script", "double"]
)
MAX_FORMULA_LETTERS = 0.03
# In so many words as a window has: a name in its own script. A damaged model says words of it again and again.
MAX_FOREIGN_LETTERS = 12
# Longest run of letters and digits in healthy prose, with room: "adenosintriphosphate" has 20.
MAX_WORD_CHARS = 40
# About 40 % of the words of English prose are function words; of random vocabulary nearly none.
MIN_FUNCTION_WORDS = 0.15
_ENGLISH = """
    a an the this that these those it its they them their who which can will is are was were be been as
    of and or but not to in into on at by for from with through when where how then than also such
"""
LATIN = ["latin"]
FUNCTION_WORDS = {"en": frozenset(_ENGLISH.split())}
# A long answer is judged window by window as well: a model that degenerates late is healthy on average.
WINDOW_WORDS = 200


def find_loop(text: Sequence[str]) -> str | None:
    """The words that a text repeats again and again, or None.

    Looks for a block repeated at once (a run of one period), then for a text that circles over longer parts (share of
    repeated 4-grams), then for a long passage that comes again and again.
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
    passages = Counter(tuple(text[at : at + PASSAGE_WORDS]) for at in range(len(text) - PASSAGE_WORDS + 1))
    if passages and passages.most_common(1)[0][1] >= PASSAGE_TIMES:
        return " ".join(passages.most_common(1)[0][0])
    return None


def stutter(text: str) -> str | None:
    """The few characters that a text says over and over, or None."""
    for found in STUTTER.finditer(text):
        run, unit = found[0], found[1]
        if any(letter.isalnum() for letter in unit):
            healthy = len(run) < MAX_STUTTER_OF_LETTERS
        elif RULE.issuperset(run):
            healthy = len(run) <= MAX_RULE
        else:
            healthy = len(run) < MAX_STUTTER
        if not healthy:
            return unit
    return None


def noise(text: str) -> str | None:
    """What of a text is signs instead of words, where that is nearly all of a stretch."""
    for start in range(0, len(text) - SIGN_WINDOW + 1, SIGN_WINDOW // 4):
        part = text[start : start + SIGN_WINDOW]
        signs = sum(unicodedata.category(sign)[0] in "PSC" and not sign.isspace() for sign in part)
        if signs > MAX_SIGNS * SIGN_WINDOW:
            return f"{signs} of {SIGN_WINDOW} characters are signs: {part[:40]!r}"
    return None


def script(letter: str) -> str:
    """The script of a letter in lower case ("latin", "cyrillic", "cjk"), from its Unicode name."""
    return unicodedata.name(letter, "unknown").split()[0].split("-")[0].lower()


def foreign_letters(text: str, scripts: Sequence[str]) -> dict[str, int]:
    """How many letters of which other scripts a text holds."""
    found = Counter(script(letter) for letter in text if letter.isalpha())
    return {name: n for name, n in found.items() if name not in scripts}


def drift(said: Sequence[str], text: str, scripts: Sequence[str]) -> str | None:
    """The letters of other scripts, where a text and its words hold more of them than names and formulas bring."""
    letters = sum(letter.isalpha() for letter in text)
    foreign = foreign_letters(text, scripts)
    formulas = sum(n for name, n in foreign.items() if name in FORMULA)
    allowed = MAX_FOREIGN_LETTERS * max(1.0, len(said) / WINDOW_WORDS)
    if formulas > MAX_FORMULA_LETTERS * letters or sum(foreign.values()) - formulas > allowed:
        return f"drift into other scripts: {foreign} of {letters} letters"
    return None


def repeats(loop: str, part: str = "answer") -> str:
    """The reason to fail for what a part of an answer says over and over."""
    return f"the {part} repeats itself: {loop[:80]!r}"


def faults_of(said: Sequence[str], text: str, scripts: Sequence[str], language: str | None) -> Iterator[str]:
    """What is no prose in a text and its words."""
    if loop := find_loop(said):
        yield repeats(loop)
    if drifted := drift(said, text, scripts):
        yield drifted
    longest = max(said, key=len)
    if len(longest) > MAX_WORD_CHARS:
        yield f"a word of {len(longest)} characters: {longest[:MAX_WORD_CHARS]}"
    if language is None:
        return
    share = sum(word in FUNCTION_WORDS[language] for word in said) / len(said)
    if share < MIN_FUNCTION_WORDS:
        yield f"no prose: {share:.0%} function words ({language}), wanted {MIN_FUNCTION_WORDS:.0%}"


def windows(text: str) -> Iterator[tuple[int, str]]:
    """Parts of WINDOW_WORDS words, half of them shared with the next, the last one whole; with their first word."""
    parts = text.split()
    if len(parts) <= WINDOW_WORDS:
        return
    starts = [*range(0, len(parts) - WINDOW_WORDS, WINDOW_WORDS // 2), len(parts) - WINDOW_WORDS]
    for first in starts:
        yield first, " ".join(parts[first : first + WINDOW_WORDS])


def coherent(limits: Any) -> Callable[[str], str | None]:
    """Prose: long enough, on its subject, in its script and language, without loops.

    ``min_words`` (of scripts without blanks, characters); ``terms``: of each list of forms at least one occurs;
    ``scripts``: allowed scripts; ``language``: whose function words are counted, of Latin script alone English if no
    other is named, else none.
    """
    known(limits, ("min_words", "terms", "scripts", "language"))
    min_words = integer(limits, "min_words", least=1)
    terms = [forms(entry) for entry in limits.get("terms", [])]
    scripts = forms(limits.get("scripts", LATIN))
    language = limits.get("language", "en" if scripts == LATIN else None)
    if language is not None and language not in FUNCTION_WORDS:
        raise ValueError(f"coherent: language {language!r} is not known; known: {', '.join(FUNCTION_WORDS)}")

    def faults(text: str) -> Iterator[str]:
        said = words(text)
        if len(said) < min_words:
            yield f"{len(said)} words, wanted at least {min_words}"
        for entry in terms:
            if not any(mentions(text, form) for form in entry):
                yield "not on the subject: found none of " + ", ".join(map(repr, entry))
        yield from faults_of(said, text, scripts, language)
        for first, part in windows(text):
            if (part_words := words(part)) and (fault := next(faults_of(part_words, part, scripts, language), None)):
                yield f"from word {first + 1} on: {fault}"

    return lambda text: next(faults(text), None)
