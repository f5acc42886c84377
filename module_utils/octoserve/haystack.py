"""A long context of unlike sentences with one fact to find in it, the same for the same seed.

The test of "needle in a haystack": https://github.com/gkamradt/LLMTest_NeedleInAHaystack. The sentences are made
up, so that no model knows them and none repeats.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

PLACES = ("Aldby", "Bergholm", "Castrel", "Dunmore", "Eskfield", "Farnley", "Grenoch", "Hartwick", "Lindum", "Oxley")
GOODS = (
    "barley",
    "copper",
    "oak",
    "paper",
    "salt",
    "slate",
    "tin",
    "wool",
    "amber",
    "cheese",
    "glass",
    "hemp",
    "linen",
)
PEOPLE = ("Adler", "Brandt", "Costa", "Duval", "Eriksen", "Fischer", "Garcia", "Haas", "Jensen", "Klein", "Moreau")
SENTENCES = (
    "On day {day} the ship from {place} to {other} carried {amount} crates of {good}.",
    "{person} of {place} paid {amount} crowns for {good} and went home before dark.",
    "The road between {place} and {other} was closed for {day} days after the flood.",
    "In {place} the price of {good} rose by {day} percent, and {person} bought none.",
    "A letter from {person} says that {amount} people live in {other} now.",
    "{person} counted {amount} sacks of {good} in the store behind the church of {place}.",
)
ARCHIVES = ("north", "south", "east", "west", "upper", "lower")


def sentences(seed: int) -> Iterator[str]:
    """Endless sentences."""
    chance = random.Random(seed)  # noqa: S311  # no secret: the same text each time
    while True:
        place, other = chance.sample(PLACES, 2)
        yield chance.choice(SENTENCES).format(
            place=place,
            other=other,
            good=chance.choice(GOODS),
            person=chance.choice(PEOPLE),
            day=chance.randint(2, 99),
            amount=chance.randint(100, 9999),
        )


def question(tokens: int, depth: float, seed: int, count: Callable[[str], int]) -> tuple[str, str]:
    """A prompt of at most ``tokens`` tokens that hides a code at ``depth`` (0 to 1) of its text, and the code.

    ``count`` tells the tokens of a prompt in the chat template; it is asked a few times. Raises ValueError where
    not even a short text fits.
    """
    chance = random.Random(seed)  # noqa: S311  # no secret: the same text each time
    archive, code = chance.choice(ARCHIVES), str(chance.randint(10000, 99999))
    source = sentences(seed)
    hay = [next(source) for _ in range(20)]

    def prompt(number: int) -> str:
        while len(hay) < number:
            hay.append(next(source))
        before = round(depth * number)
        text = [*hay[:before], f"The code of the {archive} archive is {code}.", *hay[before:number]]
        ask = f"What is the code of the {archive} archive? Answer with the number only."
        return f"Read this text, then answer the question after it.\n\n{' '.join(text)}\n\n{ask}"

    short = count(prompt(0))
    each = (count(prompt(20)) - short) / 20
    if each <= 0:
        raise ValueError(f"the server counts {short} tokens whatever the prompt")
    number = int((tokens - short) / each)
    # The sentences differ in length, so the estimate is corrected: too long does not fit, too short proves less.
    for _ in range(5):
        if number < 1:
            raise ValueError(f"no text fits into {tokens} tokens")
        measured = count(prompt(number))
        if tokens - 2 * each <= measured <= tokens:
            break
        step = (tokens - measured) / each
        number += int(step) if step > 0 else int(step) - 1
    return prompt(number), code
