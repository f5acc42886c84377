"""A suite of the coherence gate: cases as data, read and checked before anything is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from . import reference
from .answer_checks import CHECKS, Check
from .document import integer, known, number, text
from .statements import forms, states, words

if TYPE_CHECKING:  # a controller that only reads suites has no `requests`
    from .openai_api import Completion, Message

MAX_TOKENS = 256
# Absolute differences of log probabilities (nats) between two computations of the same tokens on a healthy server, in
# bf16: measured on an H200, 0.007 at most over likely tokens; unlikely ones and routing that flips add more.
BOUND = {"mean": 0.05, "max": 2.0}
# The same from a reference, which another stack may have measured, whose kernels round otherwise. SmolLM2 in bfloat16
# lies 0.04 and 0.27 from float32; a mixture of 4-bit experts, whose routing flips, has not been measured.
DRIFT = {"mean": 0.1, "max": 2.0}
PARSERS = ("tool_call", "reasoning")
COMMON = ("name", "private", "needs")


@dataclass(frozen=True)
class Bound:
    """How far log probabilities of the same tokens may lie apart: mean and largest absolute difference, nats."""

    mean: float
    max: float


@dataclass(frozen=True)
class Case:
    """What every kind of case has. ``needs``: parsers of the profile without which the case does not apply."""

    kind: ClassVar[str]
    name: str
    messages: tuple[Message, ...]
    private: bool = False
    needs: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """What is asked, for people to read."""
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in self.messages)


@dataclass(frozen=True)
class Question(Case):
    """One question and what its answer must be.

    ``allow_length``: an answer cut by ``max_tokens`` is judged like another; without it, that is a failure,
    for a model that does not stop is a broken one. ``options`` go into the request; without a ``temperature`` among
    them it is 0.
    """

    kind: ClassVar[str] = "question"
    max_tokens: int = MAX_TOKENS
    checks: tuple[tuple[str, Callable[[Completion], str | None]], ...] = ()
    stream: bool = False
    allow_length: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wants_text(self) -> bool:
        """An answer that is to be a tool call may come without a text."""
        return "tool_call" not in dict(self.checks)


@dataclass(frozen=True)
class Agreement(Case):
    """One answer, whole and streamed, decoded and computed again from its tokens: all must agree.

    ``tie``: where two tokens are this close (nats), the whole and the streamed answer may differ. In bfloat16 a logit
    between 32 and 64 has steps of 0.25, and each of the two may be one off.
    """

    kind: ClassVar[str] = "agreement"
    max_tokens: int = MAX_TOKENS
    bound: Bound = field(default_factory=lambda: Bound(**BOUND))
    tie: float = 0.5


@dataclass(frozen=True)
class Needle(Case):
    """A fact at a depth (0 to 1) of a context of ``tokens`` (None: as long as the server allows)."""

    kind: ClassVar[str] = "needle"
    tokens: int | None = None
    depth: float = 0.5
    max_tokens: int = MAX_TOKENS


@dataclass(frozen=True)
class Score(Case):
    """A fixed text whose tokens the model is to find likely, alone, again and under load.

    With ``messages`` the text is the answer to them in the chat template, without it stands alone. ``ceiling``:
    perplexity that no healthy model exceeds, whatever limit it is held to. ``drift``: how far it may lie from its
    reference.
    """

    kind: ClassVar[str] = "score"
    text: str = ""
    ceiling: float = 0.0
    bound: Bound = field(default_factory=lambda: Bound(**BOUND))
    drift: Bound = field(default_factory=lambda: Bound(**DRIFT))

    @property
    def prompt(self) -> str:
        """What is scored, for people to read."""
        if not self.messages:
            return self.text
        said = [*self.messages, {"role": "assistant", "content": self.text}]
        return "\n".join(f"{message['role']}: {message['content']}" for message in said)

    def identity(self, chat_template_args: Mapping[str, Any]) -> str:
        """SHA-256 of what is scored: a reference speaks of this text and no other."""
        template = dict(chat_template_args) if self.messages else {}
        content = [list(self.messages), self.text, template]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Suite:
    """A named list of cases."""

    name: str
    cases: tuple[Case, ...]


def parse_suite(document: Any) -> Suite:
    """Read a suite. Raises ValueError that names the case and what is wrong in it, also where there is none."""
    keys = ("name", "max_tokens", "bound", "drift", "private", "cases")
    if not isinstance(document, Mapping):  # not quoted: its cases may be private
        raise ValueError(f"found a {type(document).__name__}, wanted a mapping with {', '.join(keys)}")
    known(document, keys)
    suite = text(document, "name")
    if not isinstance(document.get("cases") or [], list):
        raise ValueError(f"cases: found a {type(document['cases']).__name__}, wanted a list")
    cases = [case for data in document.get("cases") or [] for case in _parse_case(data, document)]
    if not cases:
        raise ValueError(f"suite {suite} holds no cases: a gate that asks nothing proves nothing")
    check_names(cases)
    return Suite(suite, tuple(cases))


def check_names(cases: Sequence[Case]) -> None:
    """Raises ValueError where two cases have one name."""
    names = [case.name for case in cases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"more than one case is called {', '.join(twice)}")


def check_held(
    suites: Iterable[Suite], perplexity: Mapping[str, Any], references: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raises ValueError for a limit that is none, and for a limit or a reference of no scored text of the suites."""
    texts = [case.name for suite in suites for case in suite.cases if isinstance(case, Score)]
    for name in perplexity:
        try:
            number(perplexity, name)
        except ValueError as error:
            raise ValueError(f"gates.perplexity: {error}") from error
    reference.strangers(perplexity, texts, "gates.perplexity")
    reference.strangers(reference.check(references), texts, "gates.reference")


def _parse_case(data: Any, suite: Mapping[str, Any]) -> list[Case]:
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str) or not data["name"]:
        keys = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"a case without a name, of {keys or 'nothing'}")
    try:
        needs = data.get("needs", [])
        if not isinstance(needs, list) or not set(needs) <= set(PARSERS):
            raise ValueError(f"needs: found {needs!r}, wanted a list of {', '.join(PARSERS)}")
        common = {"private": bool(data.get("private", suite.get("private", False))), "needs": tuple(needs)}
        for kind, parse in _KINDS.items():
            if kind in data:
                return parse(data, suite, common)
        return _parse_question(data, suite, common)
    except ValueError as error:
        if data.get("private", suite.get("private", False)):
            keys = ", ".join(sorted(set(data) - {"name"}))
            raise ValueError(f"case {data['name']!r}: one of {keys} is wrong (private, so no more is told)") from None
        raise ValueError(f"case {data['name']!r}: {error}") from error


def _parse_question(data: Mapping[str, Any], suite: Mapping[str, Any], common: dict[str, Any]) -> list[Case]:
    keys = ("prompt", "messages", "max_tokens", "stream", "allow_length", "sampled", "expect", "tools")
    known(data, (*COMMON, *keys, "chat_template_args"))
    expect = data.get("expect")
    if not isinstance(expect, Mapping) or not expect:
        raise ValueError(f"expect: wanted at least one of {', '.join(_EXPECTATIONS)}: it could not fail")
    known(expect, tuple(_EXPECTATIONS))
    checks = tuple((kind, make(expect[kind])) for kind, make in _EXPECTATIONS.items() if kind in expect)
    options: dict[str, Any] = {}
    if "tools" in data:
        options["tools"] = data["tools"]
    if "chat_template_args" in data:
        options["chat_template_kwargs"] = data["chat_template_args"]
    if data.get("sampled", False):
        options["temperature"] = None  # what is served where a client names none
    stream = data.get("stream", False)
    if stream not in (True, False, "both"):
        raise ValueError(f"stream: found {stream!r}, wanted true, false or both")
    return [
        Question(
            name=data["name"] + (" (streamed)" if streamed and stream == "both" else ""),
            messages=_messages(data),
            max_tokens=_max_tokens(data, suite),
            checks=checks,
            stream=streamed,
            allow_length=bool(data.get("allow_length", False)),
            options=options,
            **common,
        )
        for streamed in ((False, True) if stream == "both" else (stream,))
    ]


def _parse_agreement(data: Mapping[str, Any], suite: Mapping[str, Any], common: dict[str, Any]) -> list[Case]:
    known(data, (*COMMON, "agreement"))
    asked = data["agreement"]
    known(asked, ("prompt", "messages", "max_tokens", "bound", "tie"))
    tie = number(asked, "tie") if "tie" in asked else Agreement.tie
    return [
        Agreement(
            data["name"],
            _messages(asked),
            max_tokens=_max_tokens(asked, suite),
            bound=_bound("bound", BOUND, asked, suite),
            tie=tie,
            **common,
        )
    ]


def _parse_needle(data: Mapping[str, Any], suite: Mapping[str, Any], common: dict[str, Any]) -> list[Case]:
    known(data, (*COMMON, "needle"))
    asked = data["needle"]
    known(asked, ("lengths", "depths", "max_tokens"))
    lengths, depths = asked.get("lengths"), asked.get("depths")
    if not isinstance(lengths, list) or not lengths or not all(_is_length(entry) for entry in lengths):
        raise ValueError(f"lengths: found {lengths!r}, wanted a list of tokens (at least 200) or `served`")
    if not isinstance(depths, list) or not depths or not all(_is_share(entry) for entry in depths):
        raise ValueError(f"depths: found {depths!r}, wanted a list of shares from 0 to 1")
    return [
        Needle(
            f"{data['name']} at {depth:.0%} of {'all' if length == 'served' else length} tokens",
            (),
            tokens=None if length == "served" else length,
            depth=float(depth),
            max_tokens=_max_tokens(asked, suite),
            **common,
        )
        for length in lengths
        for depth in depths
    ]


def _parse_score(data: Mapping[str, Any], suite: Mapping[str, Any], common: dict[str, Any]) -> list[Case]:
    known(data, (*COMMON, "score"))
    asked = data["score"]
    known(asked, ("prompt", "messages", "text", "ceiling", "bound", "drift"))
    messages = _messages(asked) if {"prompt", "messages"} & set(asked) else ()
    ceiling = number(asked, "ceiling")
    scored = text(asked, "text").strip()
    bound, drift = (_bound(key, usual, asked, suite) for key, usual in (("bound", BOUND), ("drift", DRIFT)))
    return [Score(data["name"], messages, text=scored, ceiling=ceiling, bound=bound, drift=drift, **common)]


def tool_call(wanted: Any) -> Callable[[Completion], str | None]:
    """Exactly one call: of this function, of each argument one of the accepted forms, no further arguments."""
    known(wanted, ("name", "arguments"))
    function = text(wanted, "name")
    arguments = wanted.get("arguments")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments: found {arguments!r}, wanted of each argument a list of accepted forms")
    accepted = {str(key): forms(values) for key, values in arguments.items()}

    def check(answer: Completion) -> str | None:
        if len(answer.tool_calls) != 1:
            return f"found {len(answer.tool_calls)} tool calls, wanted one of {function}; text: {answer.text[:80]!r}"
        called = answer.tool_calls[0].get("function") or {}
        if called.get("name") != function:
            return f"found a call of {called.get('name')!r}, wanted {function!r}"
        if answer.finish_reason != "tool_calls" or not answer.tool_calls[0].get("id"):
            given = answer.tool_calls[0].get("id")
            return f"the call has id {given!r} and ended with {answer.finish_reason!r}, wanted an id and 'tool_calls'"
        try:
            found = json.loads(called.get("arguments") or "")
        except (ValueError, TypeError) as error:
            return f"the arguments are no JSON ({error}): {called.get('arguments')!r}"
        if not isinstance(found, dict) or set(found) != set(accepted):
            return f"found the arguments {found!r}, wanted {', '.join(accepted)}"
        wrong = [key for key, value in found.items() if not any(states(str(value), form) for form in accepted[key])]
        return f"{wrong[0]} is {found[wrong[0]]!r}, wanted one of {accepted[wrong[0]]}" if wrong else None

    return check


def reasoning(wanted: Any) -> Callable[[Completion], str | None]:
    """Reasoning of at least ``min_words`` words, apart from the answer; 0: none at all."""
    known(wanted, ("min_words",))
    fewest = integer(wanted, "min_words", least=0)

    def check(answer: Completion) -> str | None:
        found = len(words(answer.reasoning))
        if fewest == 0 and found:
            return f"found {found} words of reasoning, wanted none"
        return f"found {found} words of reasoning, wanted at least {fewest}" if found < fewest else None

    return check


def completion_tokens(wanted: Any) -> Callable[[Completion], str | None]:
    """At least ``min`` tokens, as the server counts them."""
    known(wanted, ("min",))
    fewest = integer(wanted, "min", least=1)

    def check(answer: Completion) -> str | None:
        found = answer.usage.completion_tokens if answer.usage else 0
        return f"found {found} tokens, wanted at least {fewest}" if found < fewest else None

    return check


def _of_text(make: Callable[[Any], Check]) -> Callable[[Any], Callable[[Completion], str | None]]:
    def of_answer(wanted: Any) -> Callable[[Completion], str | None]:
        check = make(wanted)
        return lambda answer: check(answer.text)

    return of_answer


_EXPECTATIONS: Mapping[str, Callable[[Any], Callable[[Completion], str | None]]] = {
    **{kind: _of_text(make) for kind, make in CHECKS.items()},
    "tokens": completion_tokens,
    "reasoning": reasoning,
    "tool_call": tool_call,
}
_KINDS = {"agreement": _parse_agreement, "needle": _parse_needle, "score": _parse_score}


def _messages(data: Mapping[str, Any]) -> tuple[Message, ...]:
    prompt, messages = data.get("prompt"), data.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("wanted either prompt or messages")
    if prompt is not None:
        return ({"role": "user", "content": str(prompt)},)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages: found {messages!r}, wanted a list of role and content")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"messages: found {message!r}, wanted role and content")
        known(message, ("role", "content", "tool_calls", "tool_call_id"))
    return tuple(messages)


def _max_tokens(data: Mapping[str, Any], suite: Mapping[str, Any]) -> int:
    return integer({"max_tokens": data.get("max_tokens", suite.get("max_tokens", MAX_TOKENS))}, "max_tokens", least=1)


def _bound(key: str, default: Mapping[str, float], data: Mapping[str, Any], suite: Mapping[str, Any]) -> Bound:
    bound = data.get(key, suite.get(key, default))
    known(bound, ("mean", "max"))
    return Bound(number(bound, "mean"), number(bound, "max"))


def _is_length(value: Any) -> bool:
    return value == "served" or (isinstance(value, int) and not isinstance(value, bool) and value >= 200)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
