"""What a healthy model says to the default suite, and faults that a scripted server can have.

Each fault is a function of the healthy script (or of the log probabilities), named by what it stands for on a real
host. None of them ends in an error: every one answers, and the gate must judge it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from octoserve import haystack
from octoserve.coherence import LOAD_PROMPT

from tests.gates.scripted_model import Answer, Body, Script, Seen, Shift, tokens_of

COUNT = "\n".join(str(number) for number in range(1, 51))
ESSAY_SENTENCES = 170
ESSAY = " ".join(
    f"{sentence} So the steam engine, the railway, the factory and the city changed what people did in {1800 + number}."
    if number % 10 == 0
    else sentence
    for number, sentence in enumerate(islice(haystack.sentences(7), ESSAY_SENTENCES))
)
PARIS = json.dumps({"city": "Paris"})
CALL: Body = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
SKY = (
    "The sky is blue because air scatters the light of the sun. Short waves are scattered far more than long ones, so "
    "blue light comes from every side, while red light goes nearly straight through."
)
PHOTOSYNTHESIS = (
    "Photosynthesis is the process by which plants turn light into chemical energy. In the chloroplasts of their "
    "leaves, chlorophyll absorbs sunlight, and with its energy the plant makes sugar from water and carbon dioxide. "
    "Oxygen is left over and goes into the air, where animals and people breathe it."
)
RAIN = (
    "Rain begins with water that the sun turns into vapour. The warm, moist air rises, and as it cools the vapour "
    "condenses on tiny grains of dust and becomes a cloud of droplets. These meet and join until they are too heavy "
    "for the wind that carries them, and then they fall to the ground as rain."
)
LONG_CONTEXT = 20000  # characters
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is the chemical symbol of gold?": "The chemical symbol of gold is Au.",
    "Who wrote the play Romeo and Juliet?": "William Shakespeare wrote it.",
    "At how many degrees Celsius does water boil at sea level?": "Water boils at 100 °C at sea level.",
    "Is the sun a planet? Begin your answer with yes or no.": "No. The sun is a star.",
    "What is 17 + 25? Answer with the number only.": "42",
    "What is 12 times 12? Answer with the number only.": "144",
    "Count from 1 to 50, writing each number on a new line.": COUNT,
    "Count from 1 to 50, writing each number on a new line. Write nothing else.": COUNT,
    "Explain photosynthesis in a short paragraph.": PHOTOSYNTHESIS,
    'Translate "The weather is good today." into Russian. Answer with the translation only.': "Сегодня хорошая погода.",
    "What is my name?": "Your name is Bruno.",
    "Which number was I to ask for? Answer with the number only.": "4817",
    "What is the capital of Spain?": "MANGO",
    "What is 2 + 2? You need no tool for this.": "2 + 2 = 4.",
    "Explain in about one hundred words why the sky is blue.": SKY,
    "Explain in a short paragraph how rain forms.": RAIN,
}
BY_BEGINNING = {
    "A box holds 6 eggs.": "37",
    "Write a detailed essay": ESSAY,
    "Name three primary colours": "- red\n- blue\n- yellow",
    "Ada Lovelace was born": '{"name": "Ada Lovelace", "city": "London", "year": 1815}',
    LOAD_PROMPT[:20]: " ".join(islice(haystack.sentences(9), 5)),
}
NEEDLE = re.compile(r"The code of the (\w+) archive is (\d+)\.")


def healthy(body: Body, seen: Seen) -> Answer:
    """The right answer to every case of the default suite. A prompt that it does not know is a mistake of the test."""
    del seen
    messages = body["messages"]
    asked = str(messages[-1]["content"])
    if messages[-1]["role"] == "tool":
        return Answer("It is 7 degrees in Paris, with hail.")
    if body.get("tools") and "weather" in asked:
        return Answer(tool_calls=(CALL,), finish_reason="tool_calls")
    if asked == "What is 17 times 23?":
        return Answer("17 times 23 is 391.", reasoning="17 times 20 is 340 and 17 times 3 is 51, so it is 391.")
    if found := NEEDLE.search(asked):
        return Answer(found[2])
    begun = [answer for beginning, answer in BY_BEGINNING.items() if asked.startswith(beginning)]
    return Answer(begun[0] if begun else ANSWERS[asked])


def of_text(change: Callable[[str], str], only: str = "") -> Script:
    """A fault in the text of every answer, or of those to prompts that begin with ``only``."""

    def script(body: Body, seen: Seen) -> Answer:
        right = healthy(body, seen)
        return (
            replace(right, text=change(right.text)) if str(body["messages"][-1]["content"]).startswith(only) else right
        )

    return script


def late(rest: str) -> Script:
    """An essay that is healthy for 1,100 words."""
    return of_text(lambda text: " ".join([*text.split()[:1100], rest]), "Write a detailed essay")


def streamed(change: Callable[[list[str]], Sequence[str]]) -> Script:
    """A fault in the events of every stream."""

    def script(body: Body, seen: Seen) -> Answer:
        right = healthy(body, seen)
        return (
            replace(right, events=tuple(change(tokens_of(right.text)))) if body.get("stream") and right.text else right
        )

    return script


def messages(change: Callable[[list[Body]], list[Body]]) -> Script:
    """A fault in what the model gets to see. What it then does not know it makes up."""

    def script(body: Body, seen: Seen) -> Answer:
        try:
            return healthy({**body, "messages": change(body["messages"])}, seen)
        except KeyError:
            return Answer("I am not sure about that, sorry.")

    return script


def forgetful(body: Body, seen: Seen) -> Answer:
    """Only the last message is seen."""
    asked, alone = str(body["messages"][-1]["content"]), len(body["messages"]) == 1
    made_up = {
        "What is my name?": "Your name is Anna.",
        "Which number was I to ask for? Answer with the number only.": "42",
    }
    made_up["What is the capital of Spain?"] = "The capital of Spain is Madrid."
    return healthy(body, seen) if alone or asked not in made_up else Answer(made_up[asked])


def after_a_long_context(rest: str, finish_reason: str = "stop") -> Script:
    """A model that finds what it is asked for in a long context and cannot stop there."""

    def script(body: Body, seen: Seen) -> Answer:
        right = healthy(body, seen)
        long = len(str(body["messages"][-1]["content"])) > LONG_CONTEXT
        return replace(right, text=right.text + rest, finish_reason=finish_reason) if long else right

    return script


def sampled(change: Callable[[str], str]) -> Script:
    """A fault in answers whose tokens are drawn."""

    def script(body: Body, seen: Seen) -> Answer:
        right = healthy(body, seen)
        return replace(right, text=change(right.text)) if body.get("temperature") is None else right

    return script


def window(characters: int) -> Script:
    """Only the last characters of a prompt are seen: a cache that is too short, or positions that wrap."""

    def script(body: Body, seen: Seen) -> Answer:
        asked = str(body["messages"][-1]["content"])
        lost = "The code of the" in asked and not NEEDLE.search(asked[-characters:])
        return Answer("12345") if lost else healthy(body, seen)

    return script


def lost_in_the_middle(body: Body, seen: Seen) -> Answer:
    """Of long contexts the middle third is not attended to."""
    asked = str(body["messages"][-1]["content"])
    found = NEEDLE.search(asked)
    middle = found and len(asked) > LONG_CONTEXT and 1 / 3 < found.start() / len(asked) < 2 / 3
    return Answer("12345") if middle else healthy(body, seen)


def of_another_request(body: Body, seen: Seen) -> Answer:
    """Under load, one request gets the buffer of another."""
    return seen.last if seen.under_way > 2 and seen.last.text else healthy(body, seen)


def call(change: Callable[[Body], Sequence[Body]], only_streamed: bool = False) -> Script:
    """A fault in tool calls."""

    def script(body: Body, seen: Seen) -> Answer:
        right = healthy(body, seen)
        if not right.tool_calls:
            return right
        changed = tuple(change(right.tool_calls[0]))
        return replace(right, stream_tool_calls=changed) if only_streamed else replace(right, tool_calls=changed)

    return script


def thinking(change: Callable[[Answer], Answer]) -> Script:
    """A fault in answers with reasoning."""

    def script(body: Body, seen: Seen) -> Answer:
        right = healthy(body, seen)
        return change(right) if right.reasoning else right

    return script


def raw_call(body: Body, seen: Seen) -> Answer:
    """The tool call stays in the text: no parser, or the wrong one."""
    right = healthy(body, seen)
    if not right.tool_calls:
        return right
    return Answer("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>")


def decoded(shift: float, most: int = 10**6) -> Script:
    """Right words from wrong numbers: decoding reads a buffer that the step before wrote, with so many under way."""

    def script(body: Body, seen: Seen) -> Answer:
        return replace(healthy(body, seen), logprob_shift=shift if seen.under_way <= most else 0.0)

    return script


def no_shift(tokens: Sequence[str], seen: Seen) -> float:
    """Healthy log probabilities."""
    del tokens, seen
    return 0.0


def unlike_each_time() -> Shift:
    """Another log probability at each call: memory that nobody wrote."""
    calls = iter(range(10**6))
    return lambda _tokens, _seen: -0.2 * (next(calls) % 2)


@dataclass(frozen=True)
class Fault:
    """One fault: what the script says, what is added to log probabilities of prompts, and the cases that see it.

    No case is named where chance decides which: then some case has to see it.
    """

    caught_by: tuple[str, ...]
    script: Script = healthy
    score_shift: Callable[[], Shift] = lambda: no_shift


def cut(arguments: str) -> Callable[[Body], list[Body]]:
    """A call with other arguments."""
    return lambda right: [{**right, "function": {**right["function"], "arguments": arguments}}]


CJK = "他们在冬天的海边等待着船只归来然后把面包分给孩子们吃直到春天来临为止大家都很高兴也很平静"
SALAD = "lamp reactor blue tuesday seven widget tax carbon stone yellow run cloud nine table fish " * 2
DICE = [SALAD.split()[n * 7 % 15] + str(n) for n in range(150)]

BRACKETS = "()[]{}<>«»;"

FAULTS: dict[str, Fault] = {
    # Late degeneration
    "a loop after 1100 words": Fault(("long-answer",), late("and the ship came home and " * 30)),
    "another script after 1100 words": Fault(("long-answer",), late(CJK)),
    "word salad after 1100 words": Fault(("long-answer",), late(" ".join(DICE))),
    "exclamation marks after 1100 words": Fault(("long-answer",), late("!" * 4000)),
    "bars of a table after 1100 words": Fault(("long-answer",), late("| " * 2000)),
    "blank lines after 1100 words": Fault(("long-answer",), late("\n" * 2000)),
    "brackets of all kinds after 1100 words": Fault(
        ("long-answer",), late("".join(BRACKETS[n * n % 11] for n in range(800)))
    ),
    "exclamation marks after a paragraph": Fault(("photosynthesis",), of_text(lambda text: text + "!" * 200)),
    "broken UTF-8 after 1100 words": Fault(("long-answer",), late("the sh\ufffdp came home.")),
    "an answer that stops early": Fault(("long-answer",), late("")),
    "one paragraph again and again": Fault(
        ("long-answer",), of_text(lambda text: " ".join([" ".join(text.split()[:150])] * 12), "Write a detailed essay")
    ),
    # Sampling
    "tokens are drawn from all of the vocabulary": Fault(("rain",), sampled(lambda _text: " ".join(DICE[:80]))),
    # Streams
    "an event of a stream lost": Fault(
        ("count-streamed-and-whole", "streamed-and-whole"), streamed(lambda events: events[:9] + events[10:])
    ),
    "an event of a stream sent twice": Fault(
        ("count-streamed-and-whole", "streamed-and-whole"), streamed(lambda events: events[:9] + events[8:])
    ),
    "two events of a stream exchanged": Fault(
        ("count-streamed-and-whole", "streamed-and-whole"),
        streamed(lambda events: [*events[:8], *events[9:10], *events[8:9], *events[10:]]),
    ),
    "the last event of a stream lost": Fault(
        ("count-streamed-and-whole", "streamed-and-whole"), streamed(lambda events: events[:-1])
    ),
    "usage of a stream that counts each token twice": Fault(
        ("count-streamed-and-whole", "streamed-and-whole"),
        lambda body, seen: replace(healthy(body, seen), counted=2 if body.get("stream") else 1),
    ),
    "a character cut into two events": Fault(
        ("streamed-and-whole",), streamed(lambda events: [*events[:3], "\ufffd", "\ufffd", *events[3:]])
    ),
    # Stale buffers and graphs
    "another request's answer under load": Fault((), of_another_request),
    "decoding reads a stale buffer": Fault(("count-streamed-and-whole", "streamed-and-whole"), decoded(-0.3)),
    "one stream alone decodes from a stale graph": Fault(
        ("count-streamed-and-whole", "streamed-and-whole"), decoded(-0.3, most=1)
    ),
    "decoding is too sure": Fault(("count-streamed-and-whole", "streamed-and-whole"), decoded(0.2)),
    "log probabilities move under load": Fault(
        ("score-prose",), score_shift=lambda: lambda _tokens, seen: -0.2 if seen.under_way > 2 else 0.0
    ),
    "memory that nobody wrote": Fault(("score-prose", "score-code"), score_shift=unlike_each_time),
    "right words, worse numbers": Fault(
        ("score-prose", "score-code", "score-answer"), score_shift=lambda: lambda _tokens, _seen: -0.4
    ),
    "log probabilities that are no numbers": Fault(
        ("score-prose",), score_shift=lambda: lambda tokens, _seen: -math.inf if len(tokens) > 50 else 0.0
    ),
    # Contexts
    "only the last 4000 characters are seen": Fault(("needle at 10% of 2000 tokens",), window(4000)),
    "only the last 100,000 characters are seen": Fault(("needle at 10% of 32000 tokens",), window(100000)),
    "the middle of long contexts is lost": Fault(("needle at 50% of 32000 tokens",), lost_in_the_middle),
    "the code of a long context, then other words": Fault(
        ("needle at 10% of 32000 tokens",), after_a_long_context("".join(f" снова {n}" for n in range(30)))
    ),
    "the code of a long context, again and again": Fault(
        ("needle at 10% of 32000 tokens",), after_a_long_context(" 12345" * 30)
    ),
    "the code of a long context, then exclamation marks": Fault(
        ("needle at 10% of 32000 tokens",), after_a_long_context("!" * 50)
    ),
    "the code of a long context, without an end": Fault(
        ("needle at 10% of 32000 tokens",), after_a_long_context("", "length")
    ),
    "only the last message is seen": Fault(("memory", "memory-after-a-question", "system-message"), forgetful),
    "the system message is lost": Fault(
        ("system-message",),
        lambda body, seen: Answer("Madrid") if body["messages"][0]["role"] == "system" else healthy(body, seen),
    ),
    # Templates, tools, reasoning
    "tokens of the template in the text": Fault(("capital-of-france",), of_text(lambda text: text + "<|user|>")),
    "an answer that does not end": Fault(
        ("capital-of-france",), lambda body, seen: replace(healthy(body, seen), finish_reason="length")
    ),
    "no answer at all": Fault(("capital-of-france",), of_text(lambda _text: "")),
    "a tool call in the text": Fault(("tool-call", "tool-call (streamed)"), raw_call),
    "arguments cut": Fault(("tool-call",), call(cut('{"city": "Par'))),
    "arguments of a call empty": Fault(("tool-call",), call(cut("{}"))),
    "arguments lost in the stream only": Fault(("tool-call (streamed)",), call(cut(""), only_streamed=True)),
    "a call without its id": Fault(("tool-call",), call(lambda right: [{**right, "id": ""}])),
    "a call sent twice": Fault(("tool-call",), call(lambda right: [right, right])),
    "a tool for everything": Fault(
        ("no-tool-needed",),
        lambda body, seen: Answer(tool_calls=(CALL,)) if body.get("tools") else healthy(body, seen),
    ),
    "reasoning in the text": Fault(
        ("reasoning-apart",),
        thinking(lambda right: Answer(f"<think>{right.reasoning}</think>{right.text}")),
    ),
    "reasoning in the text, its tags lost": Fault(
        ("reasoning-apart",), thinking(lambda right: Answer(f"{right.reasoning} {right.text}"))
    ),
    "the answer in the reasoning": Fault(
        ("reasoning-apart",), thinking(lambda right: Answer("", reasoning=f"{right.reasoning} {right.text}"))
    ),
    # Words
    "answers that deny": Fault(("capital-of-france",), of_text(lambda text: text.replace(" is ", " is not "))),
    "answers in another language": Fault(("photosynthesis",), of_text(lambda _text: CJK)),
    "a number left out": Fault(("count-to-50",), of_text(lambda text: text.replace("\n17\n", "\n"))),
    "Chinese words scattered through English": Fault(
        ("long-answer",), of_text(lambda text: re.sub(r"((?:\S+ ){20})", r"\1的是 ", text), "Write a detailed essay")
    ),
    "control characters": Fault(("capital-of-france",), of_text(lambda text: text.replace(" ", "\x00", 1))),
    "JSON with a preface": Fault(("json",), of_text(lambda text: f"Sure: {text}", "Ada Lovelace was born")),
    "a line too many": Fault(("three-lines",), of_text(lambda text: f"{text}\n- black", "Name three primary")),
}


def script_of(fault: Fault) -> dict[str, Any]:
    """Arguments of ScriptedModel."""
    return {"script": fault.script, "score_shift": fault.score_shift()}
