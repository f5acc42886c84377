"""The coherence gate: cases, as data, asked to a server and judged.

A case ends in one of three verdicts. ``could-not-run`` is never a pass: the gate holds only where every case
was asked and passed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .answer_checks import CHECKS, Check, well_formed
from .openai_api import ApiError, Client, Completion, Usage, join_chunks

PASSED = "pass"
FAILED = "fail"
COULD_NOT_RUN = "could-not-run"

KEYS = ("name", "prompt", "messages", "max_tokens", "stream", "allow_length", "expect")


@dataclass(frozen=True)
class Case:
    """One question and what its answer must be.

    ``allow_length``: an answer cut by ``max_tokens`` is judged like another; without it, that is a failure,
    for a model that does not stop is a broken one.
    """

    name: str
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int
    checks: tuple[tuple[str, Check], ...]
    stream: bool = False
    allow_length: bool = False

    @property
    def prompt(self) -> str:
        """What is asked, for people to read."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


@dataclass(frozen=True)
class Result:
    """How one case ended, with everything that a reader needs to judge it himself."""

    name: str
    verdict: str
    prompt: str
    answer: str = ""
    reason: str = ""
    seconds: float = 0.0
    finish_reason: str | None = None
    usage: Usage | None = None

    def to_dict(self) -> dict[str, Any]:
        """The case as it stands in ``summary.json``."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "prompt": self.prompt,
            "answer": self.answer,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "finish_reason": self.finish_reason,
            "usage": None
            if self.usage is None
            else {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
            },
        }


def parse_case(data: Mapping[str, Any], max_tokens: int) -> Case:
    """Read one case of a suite. Raises ValueError that says what is wrong in it."""
    name = data.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"a case without a name: {dict(data)!r}")
    try:
        unknown = sorted(set(data) - set(KEYS))
        if unknown:
            raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(KEYS)}")
        expect = data.get("expect")
        if not isinstance(expect, Mapping) or not expect:
            raise ValueError(f"expect: wanted at least one of {', '.join(CHECKS)}: it could not fail")
        kinds = sorted(set(expect) - set(CHECKS))
        if kinds:
            raise ValueError(f"expect: unknown: {', '.join(kinds)}; known: {', '.join(CHECKS)}")
        return Case(
            name=name,
            messages=_messages(data),
            max_tokens=int(data.get("max_tokens", max_tokens)),
            checks=tuple((kind, CHECKS[kind](expect[kind])) for kind in CHECKS if kind in expect),
            stream=bool(data.get("stream", False)),
            allow_length=bool(data.get("allow_length", False)),
        )
    except ValueError as error:
        raise ValueError(f"case {name!r}: {error}") from error


def parse_suite(suite: Mapping[str, Any]) -> list[Case]:
    """Read a suite: ``cases`` and the default ``max_tokens``. Raises ValueError, also where it is empty."""
    cases = [parse_case(data, suite.get("max_tokens", 256)) for data in suite.get("cases") or []]
    if not cases:
        raise ValueError("the suite holds no cases: a gate that asks nothing proves nothing")
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the suite holds {', '.join(twice)} more than once")
    return cases


def judge(case: Case, answer: Completion) -> str:
    """Why an answer fails its case; empty where it passes."""
    if reason := well_formed(answer.text):
        return reason
    if answer.finish_reason == "length" and not case.allow_length:
        return f"the answer did not end within {case.max_tokens} tokens"
    for kind, check in case.checks:
        if reason := check(answer.text):
            return f"{kind}: {reason}"
    return ""


def run_case(client: Client, case: Case, options: Mapping[str, Any]) -> Result:
    """Ask and judge one case. An answer that cannot be had is ``could-not-run``, no exception."""
    try:
        if case.stream:
            answer = join_chunks(client.stream_chat(case.messages, case.max_tokens, **options))
        else:
            answer = client.chat(case.messages, case.max_tokens, **options)
    except ApiError as error:
        return Result(case.name, COULD_NOT_RUN, case.prompt, reason=str(error))
    reason = judge(case, answer)
    return Result(
        case.name,
        FAILED if reason else PASSED,
        case.prompt,
        answer.text,
        reason,
        answer.seconds,
        answer.finish_reason,
        answer.usage,
    )


def not_asked(case: Case, reason: str) -> Result:
    """The result of a case that was never sent."""
    return Result(case.name, COULD_NOT_RUN, case.prompt, reason=reason)


def run_suite(
    client: Client,
    cases: Sequence[Case],
    options: Mapping[str, Any] | None = None,
    concurrency: int = 4,
) -> dict[str, Any]:
    """Ask all cases, a few at a time, and return ``{"ok", "passed", "total", "cases"}``.

    ``options`` go into every request (``chat_template_kwargs`` of the profile). After one case that brought
    no answer at all the rest is not asked: a hung engine would cost a timeout each.
    """
    silent = threading.Event()

    def ask(case: Case) -> Result:
        if silent.is_set():
            return not_asked(case, "not asked: a case before it brought no answer")
        result = run_case(client, case, options or {})
        if result.verdict == COULD_NOT_RUN:
            silent.set()
        return result

    with ThreadPoolExecutor(max_workers=max(1, concurrency)) as pool:
        results = list(pool.map(ask, cases))
    return summarize(results)


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """The gate's result: it holds only where there is a case and every one passed."""
    passed = sum(result.verdict == PASSED for result in results)
    return {
        "ok": 0 < len(results) == passed,
        "passed": passed,
        "total": len(results),
        "cases": [result.to_dict() for result in results],
    }


def describe(result: Mapping[str, Any]) -> str:
    """The result for people: the count, then each case that did not pass with prompt and answer."""
    lines = [f"coherence: {result['passed']} of {result['total']} cases passed"]
    for case in result["cases"]:
        if case["verdict"] != PASSED:
            lines.append(f"- {case['name']}: {case['verdict']}: {case['reason']}")
            lines.append(f"    prompt: {case['prompt'][:300]!r}")
            lines.append(f"    answer: {case['answer'][:300]!r}")
    return "\n".join(lines)


def _messages(data: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    prompt, messages = data.get("prompt"), data.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("wanted either prompt or messages")
    if prompt is not None:
        return ({"role": "user", "content": str(prompt)},)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages: found {messages!r}, wanted a list of role and content")
    for message in messages:
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"messages: found {message!r}, wanted role and content")
    return tuple(messages)
