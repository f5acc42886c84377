"""Prompts of a wanted length in tokens, no two alike, so that no prefix cache spares the server its prefill."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Callable

# Common words, so that every tokenizer knows them.
VOCABULARY = (
    "about after again air all along also always another any around ask away back because been before began below "
    "between book both boy call came can change children city close come could country cut day did different does "
    "down each earth eat end enough even every eye face family far father feet few find first follow food form found "
    "four from girl give good got great group grow had hand hard have head hear help here high home house idea its "
    "just keep kind knew know land large last late learn leave left letter life light like line list little live long "
    "look made make man many may mean men might miss more most mother mountain move much must name near need never "
    "next night now number often old once only open other our over own page paper part people picture place plant "
    "play point read really right river run said same saw say school sea second see seem sentence set she should show "
    "side small something song soon sound spell start state still stop story study such take talk tell than that "
    "their then there these thing think this those thought three through time together too took tree try turn two "
    "under until use very walk want watch water way well went were what when where which while white who why will "
    "with without word work world would write year young your"
)
# Enough words that the template around them weighs little, few enough for a short context.
SIZING_WORDS = (8, 64)


@dataclass(frozen=True)
class Sizing:
    """How a server's tokenizer and template count: ``template`` tokens, and tokens a word."""

    template: float
    per_word: float

    def words(self, tokens: int) -> int:
        """How many words make a prompt of about so many tokens."""
        return max(1, round((tokens - self.template) / self.per_word))


class Writer:
    """Writes prompts. ``seed`` decides lengths and words; a mark that differs each time goes before them, so that a
    second run finds nothing of the first in the prefix cache.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  # no secret depends on it

    def text(self, words: int) -> str:
        """A prompt of so many words after its mark."""
        return f"{secrets.token_hex(4)} " + " ".join(self.random.choices(VOCABULARY.split(), k=words))


def size(writer: Writer, prompt_tokens: Callable[[str], int]) -> Sizing:
    """Learn from two prompts how the server counts. ``prompt_tokens`` asks it for the tokens of a prompt."""
    few, many = SIZING_WORDS
    least, most = (prompt_tokens(writer.text(words)) for words in SIZING_WORDS)
    per_word = max((most - least) / (many - few), 0.1)
    return Sizing(max(0.0, least - few * per_word), per_word)
