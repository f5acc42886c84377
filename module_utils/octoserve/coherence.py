"""The coherence gate: cases, as data, asked to a server and judged.

A case ends in one of three verdicts. ``could-not-run`` is never a pass: the gate holds only where every case
was asked and passed. Fixed texts are scored alone and again, then the questions are asked, several at a time, then the
texts are scored once more under load.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from . import agreement, haystack, prose, scoring
from .answer_checks import accept, well_formed
from .coherence_suite import Agreement, Bound, Case, Needle, Question, Score, Suite, check_names
from .openai_api import ApiError, Client, Completion, Usage, join_chunks
from .patience import patiently
from .statements import words

PASSED = "pass"
FAILED = "fail"
COULD_NOT_RUN = "could-not-run"
PRIVATE = "(private)"
# Where a text's reference comes from.
PROFILE, RECORD, NO_REFERENCE = "the profile's", "this host's record", "none"
STALE = "of another text"

# A perplexity may lie this far above and below its reference: quantization kernels of another stack round otherwise.
REFERENCE_ROOM = 1.05
NEEDLE_SEED = 20
# A shorter context than this share of the wanted one proves less.
LEAST_OF_NEEDLE = 0.8
# Tokens that a needle leaves free of the longest context, beside those of its answer.
SPARE_TOKENS = 16
#: What reading an answer of another shape than an OpenAI server's raises.
BROKEN = (TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError, ArithmeticError)
LEAST_NEEDLE = 256  # a shorter text is no haystack
PROMPT_TOKENS = 512  # room for the prompt of a question
# A model that thinks before it answers needs so many more.
THINKING_TOKENS = 4096
THINKS = re.compile(r"</?think(?:ing)?>")
PROBE_TIMEOUT_S = 60.0
LOAD_START_S = 120.0  # until every stream of the load has its first token
LOAD_PROMPT = "Write a long story about a lighthouse keeper, her dog and a storm. Story number {number}."
LOAD_TOKENS = 256

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """How a suite is asked: what the profile serves with, and what its texts are held to.

    ``perplexity``: limits of the profile by the name of the case; ``references``: what the profile brings, and
    ``recorded``: what the first deploy measured (reference.py); ``bootstrap``: measure for the first time, where
    nothing is there to be held to.
    ``concurrency``: cases asked at the same time, and streams that are the load. ``order_seed`` shuffles the cases.
    ``limit_s``: seconds after which no further case is asked.
    """

    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    parsers: Mapping[str, str] = field(default_factory=dict)
    perplexity: Mapping[str, float] = field(default_factory=dict)
    references: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    recorded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bootstrap: bool = False
    concurrency: int = 4
    order_seed: int | None = None
    limit_s: float = float("inf")

    def options(self, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Fields of a request: the profile's template arguments, a case's own ones over them."""
        found = dict(extra or {})
        template = {**self.chat_template_args, **found.pop("chat_template_kwargs", {})}
        return {**found, "chat_template_kwargs": template} if template else found

    def thinking_tokens(self, options: Mapping[str, Any]) -> int:
        """Tokens that reasoning may take beside an answer; 0 where nothing parses it or the template is told not to."""
        template = options.get("chat_template_kwargs", {})
        off = any(template.get(name) is False for name in ("enable_thinking", "thinking"))
        return 0 if off or not self.parsers.get("reasoning") else THINKING_TOKENS


@dataclass(frozen=True)
class Result:
    """How one case ended, with everything that a reader needs to judge it himself.

    ``fault`` names what does not hold in a word or two that quote nothing: all that is told of a private case.
    """

    case: Case
    verdict: str
    reason: str = ""
    fault: str = ""
    answer: Completion | None = None
    prompt: str = ""
    seconds: float = 0.0
    measured: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The case as it stands in ``summary.json``."""
        answer = self.answer or Completion("", 0.0)
        told = {
            "prompt": self.prompt or self.case.prompt,
            "answer": answer.text,
            "reasoning": answer.reasoning,
            "tool_calls": list(answer.tool_calls),
            "reason": self.reason,
        }
        if self.case.private:
            hidden = dict.fromkeys(("prompt", "answer", "reasoning"), PRIVATE)
            told = {**hidden, "tool_calls": [], "reason": f"{self.fault} {PRIVATE}" if self.reason else ""}
        return {
            "name": self.case.name,
            "kind": self.case.kind,
            "verdict": self.verdict,
            **told,
            "private": self.case.private,
            "seconds": round(self.seconds, 3),
            "finish_reason": answer.finish_reason,
            "usage": _usage(answer.usage),
            "measured": self.measured,
        }


@dataclass(frozen=True)
class Held:
    """What a scored text is held to: the log probabilities of its reference, and whose that is.

    ``missing``: why it is held to nothing, where it must be.
    """

    source: str
    logprobs: Sequence[float] = ()
    missing: str = ""


def judge(case: Question, answer: Completion) -> tuple[str, str]:
    """What an answer fails its case by, in a word and in full; both empty where it passes."""
    return next(_faults(case, answer), ("", ""))


def _faults(case: Question, answer: Completion) -> Iterator[tuple[str, str]]:
    yield from _malformed(answer, case.max_tokens, wants_text=case.wants_text, allow_length=case.allow_length)
    if answer.tool_calls and case.wants_text:
        yield "tool call", f"the answer calls {len(answer.tool_calls)} tools, wanted none"
    for kind, check in case.checks:
        if reason := check(answer):
            yield kind, f"{kind}: {reason}"
    yield from _degenerate(answer, words(answer.text))


def _degenerate(answer: Completion, said: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What no model says whose sums are right: words and signs again and again. A model that thinks may say the same
    words again, so of its reasoning the signs count."""
    if loop := prose.find_loop(said):
        yield "loop", prose.repeats(loop)
    for part, text in (("answer", answer.text), ("reasoning", answer.reasoning)):
        if loop := prose.stutter(text):
            yield "loop", prose.repeats(loop, part)
        if noise := prose.noise(text):
            yield "signs", f"{part}: {noise}"


def _malformed(
    answer: Completion, max_tokens: int, *, wants_text: bool = True, allow_length: bool = False
) -> Iterator[tuple[str, str]]:
    """What no answer may be, whatever was asked: broken, or without an end of its own."""
    if (wants_text or answer.text.strip()) and (reason := well_formed(answer.text)):
        yield "form", reason
    if answer.reasoning.strip() and (reason := well_formed(answer.reasoning)):
        yield "form", f"reasoning: {reason}"
    if answer.finish_reason == "length" and not allow_length:
        yield "length", f"the answer did not end within {max_tokens} tokens"
    if answer.finish_reason not in ("stop", "length", "tool_calls"):
        yield "end", f"the answer ended with {answer.finish_reason!r}, wanted stop"


def _needle_faults(case: Needle, code: str, answer: Completion) -> Iterator[tuple[str, str]]:
    """A model that says the code and then degenerates is one that breaks at this length."""
    yield from _malformed(answer, case.max_tokens)
    if reason := accept([code])(answer.text):
        yield "needle", reason
    said = words(answer.text)
    yield from _degenerate(answer, said)
    if drifted := prose.drift(said, answer.text, prose.LATIN):
        yield "drift", drifted


def select(suites: Iterable[Suite], parsers: Mapping[str, str]) -> tuple[list[Case], list[dict[str, str]]]:
    """The cases of some suites that apply, and those that do not with the reason. Raises ValueError for equal names."""
    cases = [case for suite in suites for case in suite.cases]
    check_names(cases)
    missing = {case.name: [name for name in case.needs if not parsers.get(name)] for case in cases}
    left_out = [
        {"name": name, "reason": f"the profile names no {' and no '.join(needed)} parser"}
        for name, needed in missing.items()
        if needed
    ]
    return [case for case in cases if not missing[case.name]], left_out


def longer_than_served(cases: Iterable[Case], longest: int | None, thinking_tokens: int) -> dict[str, str]:
    """Needles in a context that the server does not take beside the answer and its reasoning, with the reason."""
    if longest is None:
        return {}
    needles = [case for case in cases if isinstance(case, Needle)]
    too_long = [
        case
        for case in needles
        if (case.tokens or LEAST_NEEDLE) > longest - case.max_tokens - thinking_tokens - SPARE_TOKENS
    ]
    return {case.name: f"the server takes {longest} tokens, prompt and answer together" for case in too_long}


def served_length(client: Client) -> int | None:
    """The longest context, None where the server does not say it or does not answer (the cases will tell that)."""
    try:
        return client.max_model_len()
    except ApiError:
        return None


class Gate:
    """One run of the gate over some cases. ``longest``: tokens of the longest context, None where it is not known.

    ``to_record``: after the run, the texts that have no reference, as reference.py keeps them.
    """

    def __init__(
        self,
        client: Client,
        cases: Sequence[Case],
        settings: Settings,
        longest: int | None = None,
        report: Report | None = None,
    ) -> None:
        self._client, self._settings, self._longest, self._report = client, settings, longest, report
        self._cases = list(cases)
        if settings.order_seed is not None:
            random.Random(settings.order_seed).shuffle(self._cases)  # noqa: S311  # no secret
        self._scores = [case for case in self._cases if isinstance(case, Score)]
        self._agreements = [case for case in self._cases if isinstance(case, Agreement)]
        self._scored: dict[str, tuple[list[int], list[float]]] = {}
        self.to_record: dict[str, dict[str, Any]] = {}
        self._silent = threading.Event()
        self._deadline = time.monotonic() + settings.limit_s
        self._lock = threading.Lock()
        self._done = self._failed = 0

    def run(self) -> list[Result]:
        """Ask everything; the results in the order of the cases. An answer that cannot be had is no exception."""
        alone = {case.name: self._attempt(case, self._score_alone) for case in self._scores}
        # One stream runs other kernels and graphs than many: what is decoded alone is held to its prefill, too.
        quiet = {case.name: self._attempt(case, self._alone) for case in self._agreements}
        together = [case for case in self._cases if not isinstance(case, (Score, Needle))]
        with ThreadPoolExecutor(max_workers=max(1, self._settings.concurrency)) as pool:
            results = {case.name: result for case, result in zip(together, pool.map(self._ask, together))}
        # One after another: long prompts only slow each other down.
        results.update({case.name: self._ask(case) for case in self._cases if isinstance(case, Needle)})
        results.update({name: result for name, result in quiet.items() if result.verdict != PASSED})
        results.update(self._score_under_load(alone))
        return [results[case.name] for case in self._cases]

    def _ask(self, case: Case) -> Result:
        kinds = {Question: self._question, Agreement: self._agreement, Needle: self._needle}
        return self._attempt(case, kinds[type(case)])  # type: ignore[arg-type]  # each takes its own kind

    def _attempt(self, case: Case, ask: Callable[[Any], Result]) -> Result:
        """One step, with its time; after one that brought no answer at all, the rest is not asked.

        A hung engine would cost a timeout each.
        """
        if self._silent.is_set():
            return Result(case, COULD_NOT_RUN, "not asked: a case before it brought no answer", "not asked")
        started = time.monotonic()
        if started > self._deadline:
            reason = f"not asked: the {self._settings.limit_s:.0f} s of this gate were over"
            return Result(case, COULD_NOT_RUN, reason, "not asked")
        try:
            result, _ = patiently(lambda: ask(case))
        except ApiError as error:
            if error.status is None and not self._answers():
                self._silent.set()
            result = Result(case, COULD_NOT_RUN, str(error), "no answer")
        except BROKEN as error:  # one answer that makes no sense must not cost the verdicts of the others
            reason = f"the server's answer cannot be read ({type(error).__name__}: {error})"
            result = Result(case, FAILED, reason, "broken answer")
        result = replace(result, seconds=result.seconds + time.monotonic() - started)
        self._tell(case, result)
        return result

    def _answers(self) -> bool:
        """Whether the server answers the shortest question: then a request was only too slow."""
        try:
            self._client.with_timeout(PROBE_TIMEOUT_S).chat([{"role": "user", "content": "Hello"}], 1)
        except ApiError:
            return False
        return True

    def _tell(self, case: Case, result: Result) -> None:
        with self._lock:
            self._done += 1
            self._failed += result.verdict != PASSED
            if self._report:
                failed = f", {self._failed} did not pass" if self._failed else ""
                self._report(
                    f"coherence{failed}, last {case.name}",
                    self._done,
                    len(self._cases) + len(self._scores) + len(self._agreements),
                )

    def _question(self, case: Question) -> Result:
        options = self._settings.options(case.options)
        longest, wanted = self._longest, case.max_tokens + self._settings.thinking_tokens(options)
        # A server refuses to be asked for more than its context holds.
        max_tokens = wanted if longest is None or wanted < longest - PROMPT_TOKENS else None
        if case.stream:
            answer = join_chunks(self._client.stream_chat(case.messages, max_tokens, **options))
        else:
            answer = self._client.chat(case.messages, max_tokens, **options)
        fault, reason = judge(case, answer)
        reason = self._with_advice(reason, answer)
        return Result(case, FAILED if reason else PASSED, reason, fault, answer)

    def _agreement(self, case: Agreement) -> Result:
        found = agreement.ask(self._client, case, self._settings.options())
        verdict = COULD_NOT_RUN if found.missing else FAILED if found.reason else PASSED
        reason = found.missing or found.reason
        return Result(
            case, verdict, reason, "answers disagree" if reason else "", found.answer, measured=found.measured
        )

    def _alone(self, case: Agreement) -> Result:
        result = self._agreement(case)
        return replace(result, reason=f"asked alone: {result.reason}") if result.reason else result

    def _needle(self, case: Needle) -> Result:
        options = self._settings.options()

        def count(prompt: str) -> int:
            return len(self._client.tokenize(messages=[{"role": "user", "content": prompt}], **options))

        max_tokens = case.max_tokens + self._settings.thinking_tokens(options)
        room = None if self._longest is None else self._longest - max_tokens - SPARE_TOKENS
        tokens = case.tokens or room
        if tokens is None:
            reason = "the server does not say how long a context it takes"
            return Result(case, COULD_NOT_RUN, reason, "context not known")
        try:
            prompt, code = haystack.question(tokens, case.depth, NEEDLE_SEED + tokens, count)
        except ValueError as error:
            return Result(case, COULD_NOT_RUN, str(error), "context too short")
        messages = ({"role": "user", "content": prompt},)
        answer = self._client.chat(messages, max_tokens, **options)
        fault, reason = next(_needle_faults(case, code, answer), ("", ""))
        asked = answer.usage.prompt_tokens if answer.usage else 0
        if not reason and not LEAST_OF_NEEDLE * tokens <= asked <= tokens:
            fault, reason = "needle", f"the server counts {asked} prompt tokens, wanted {tokens}"
        shown = prompt if len(prompt) < 1200 else f"{prompt[:300]} […] {prompt[-120:]}"
        reason = self._with_advice(reason, answer)
        measured = {"prompt_tokens": asked, "depth": case.depth}
        return Result(case, FAILED if reason else PASSED, reason, fault, answer, shown, measured=measured)

    def _with_advice(self, reason: str, answer: Completion) -> str:
        """A reason to fail, and what to do where a model thinks aloud because nothing takes its reasoning apart."""
        if not reason or self._settings.parsers.get("reasoning") or not THINKS.search(answer.text):
            return reason
        return (
            f"{reason}; the model thinks in its answer: name parsers.reasoning in the profile, or turn thinking off in "
            "its chat_template_args"
        )

    def _score_alone(self, case: Score) -> Result:
        """Score a text twice: the first against its limits and its reference, the second against the first."""
        tokens, given = scoring.tokens_of(self._client, case, self._settings.chat_template_args)
        if len(tokens) <= given:
            return Result(case, COULD_NOT_RUN, f"the text has {len(tokens) - given} tokens to score", "no tokens")
        first, again = (self._client.prompt_logprobs(tokens)[given - 1 :] for _ in range(2))
        self._scored[case.name] = (tokens, first)
        identity = case.identity(self._settings.chat_template_args)
        found = scoring.perplexity(first)
        held = self._hold(case, identity, found)
        known = held.logprobs or first
        apart, aligned = scoring.difference(first, again), len(known) == len(first)
        lowest, highest = self._limits(case, held)
        measured = {
            "perplexity": scoring.told(found),
            "limit": highest if held.logprobs or self._settings.perplexity.get(case.name) is not None else None,
            "lowest": lowest,
            "tokens": len(first),
            "reference": held.source,
            "drift": scoring.told(scoring.difference(first, known)) if held.logprobs and aligned else None,
            "drift_bound": vars(case.drift),
            "again": scoring.told(apart),
            "under_load": None,
            "bound": vars(case.bound),
        }
        if held.source != PROFILE and not held.logprobs:
            rounded = [scoring.told(round(value, scoring.DIGITS)) for value in first]
            self.to_record[case.name] = {"identity": identity, "logprobs": rounded, "perplexity": scoring.told(found)}
        drift = differs(f"the text and its reference ({held.source})", measured["drift"], case.drift, len(first))
        faults = {
            "other tokens": ""
            if aligned
            else f"the text is {len(first)} tokens, in its reference ({held.source}) {len(known)}: another tokenizer",
            "perplexity": ""
            if found <= highest
            else f"perplexity {found:.6g}, wanted at most {highest:.6g}{self._whose(highest, case, held)}",
            "too sure": ""
            if lowest is None or found >= lowest
            else f"perplexity {found:.6g}, wanted at least {lowest:.6g}{self._whose(lowest, case, held)}",
            "drift": drift,
            "same twice": differs("the same text scored twice", apart, case.bound, len(first)),
        }
        for fault, reason in faults.items():
            if reason:
                return Result(case, FAILED, reason, fault, measured=measured)
        if held.missing:
            reason = f"measured a perplexity of {found:.4g}, but {held.missing}"
            return Result(case, COULD_NOT_RUN, reason, "no limit", measured=measured)
        return Result(case, PASSED, measured=measured)

    def _hold(self, case: Score, identity: str, found: float) -> Held:
        """What a text is held to. ``found``: its perplexity."""
        brought, recorded = (found.get(case.name) for found in (self._settings.references, self._settings.recorded))
        anew = "deploy once with gates_bootstrap=true, which records what it measures where every case passes"
        changed = "is of another text or other template arguments"
        if brought:
            if brought["identity"] == identity:
                return Held(PROFILE, brought["logprobs"])
            return Held(
                f"{PROFILE}, {STALE}",
                missing=f"the profile's reference {changed}: take gates.reference out of the profile, {anew}, and copy "
                "the host's record to the profile's reference",
            )
        if recorded and recorded["identity"] == identity:
            return Held(RECORD, recorded["logprobs"])
        source = f"{RECORD}, {STALE}" if recorded else NO_REFERENCE
        if self._settings.bootstrap or self._settings.perplexity.get(case.name) is not None:
            return Held(source)
        if recorded:
            return Held(source, missing=f"this host's record {changed}: {anew}")
        limit = f"gates.perplexity: {{{case.name}: {found * REFERENCE_ROOM:.4g}}} in the profile"
        return Held(source, missing=f"there is no limit for it yet: {anew}; or, which sees less, set {limit}")

    def _limits(self, case: Score, held: Held) -> tuple[float | None, float]:
        """The lowest perplexity that a text may have, where there is one, and the highest."""
        limit = self._settings.perplexity.get(case.name)
        highest = min(case.ceiling, case.ceiling if limit is None else limit)
        if not held.logprobs:
            return None, highest
        reference = scoring.perplexity(held.logprobs)
        return reference / REFERENCE_ROOM, min(highest, reference * REFERENCE_ROOM)

    def _whose(self, limit: float, case: Score, held: Held) -> str:
        """Where a limit of the perplexity comes from."""
        if limit == case.ceiling:
            return ", the case's ceiling"
        if limit == self._settings.perplexity.get(case.name):
            return f", gates.perplexity.{case.name} of the profile"
        return f": 5 % from its reference ({held.source})"

    def _score_under_load(self, alone: Mapping[str, Result]) -> dict[str, Result]:
        """Score each text once more while other answers are under way."""
        results = dict(alone)
        if not self._scored or self._silent.is_set():
            return results
        with Load(self._client, self._settings) as load:
            for case in self._scores:
                before = alone[case.name]
                if case.name in self._scored:
                    step = self._attempt(case, partial(self._score_again, before=before, load=load))
                    step = replace(step, measured=step.measured or before.measured)
                    # A reason to fail counts more than a second look that could not be had.
                    worse = step.verdict == COULD_NOT_RUN and before.verdict == FAILED
                    results[case.name] = before if worse else step
        return results

    def _score_again(self, case: Score, before: Result, load: Load) -> Result:
        tokens, first = self._scored[case.name]
        streams = load.under_way()
        apart = scoring.difference(first, self._client.prompt_logprobs(tokens)[-len(first) :])
        streams = min(streams, load.under_way())
        measured = {**(before.measured or {}), "under_load": {**scoring.told(apart), "streams": streams}}
        result = replace(before, measured=measured)
        reason = differs("the text scored alone and under load", apart, case.bound, len(first))
        if result.verdict != FAILED and reason:
            return replace(result, verdict=FAILED, reason=reason, fault="under load")
        if result.verdict == PASSED and not streams:
            reason = f"no other answer was under way: {load.error or 'the server took one request at a time'}"
            return replace(result, verdict=COULD_NOT_RUN, reason=reason, fault="no load")
        return result


class Load:
    """``with Load(client, settings) as load:`` keeps as many answers under way as cases are asked at once.

    The block begins when each has its first token (or LOAD_START_S have passed).
    """

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client, self._options = client, settings.options({"ignore_eos": True})
        self._stop = threading.Event()
        number = max(1, settings.concurrency)
        self._answering = [threading.Event() for _ in range(number)]
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(number)]
        self.error = ""

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + LOAD_START_S
        for thread, answering in zip(self._threads, self._answering):
            while thread.is_alive() and not answering.wait(0.05) and time.monotonic() < deadline:
                pass
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def under_way(self) -> int:
        """Answers of which tokens come now."""
        return sum(answering.is_set() for answering in self._answering)

    def _ask(self, number: int) -> None:
        messages = [{"role": "user", "content": LOAD_PROMPT.format(number=number)}]
        try:
            while not self._stop.is_set():
                for _ in self._client.chunks(messages, LOAD_TOKENS, **self._options):
                    self._answering[number].set()
                    if self._stop.is_set():
                        break
        except ApiError as error:
            self.error = str(error)
        finally:
            self._answering[number].clear()


def differs(what: str, apart: Mapping[str, float] | None, bound: Bound, tokens: int) -> str:
    """The reason where log probabilities lie further apart than the bound; else empty."""
    reason = scoring.exceeds(apart, bound, tokens) if apart else ""
    return f"{what}: {reason}" if reason else ""


def run(client: Client, suites: Sequence[Suite], settings: Settings, report: Report | None = None) -> dict[str, Any]:
    """Ask some suites and return the gate's result, ``{"ok", "passed", "total", "cases", "left_out", ...}``.

    ``to_record`` in it, texts that have no reference with their log probabilities, is for the host's record alone.
    ``report`` is told the progress as (text, done, total). Raises ValueError where two cases have one name.
    """
    started = time.monotonic()
    cases, left_out = select(suites, settings.parsers)
    longest = served_length(client)
    too_long = longer_than_served(cases, longest, settings.thinking_tokens(settings.options()))
    left_out += [{"name": name, "reason": reason} for name, reason in too_long.items()]
    cases = [case for case in cases if case.name not in too_long]
    gate = Gate(client, cases, settings, longest, report)
    results = gate.run()
    return {
        **summarize(results),
        "to_record": gate.to_record,
        "seconds": round(time.monotonic() - started, 3),
        "suites": [suite.name for suite in suites],
        "bootstrap": settings.bootstrap,
        "left_out": left_out,
    }


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """The gate's verdict: it holds only where there is a case and every one passed."""
    passed = sum(result.verdict == PASSED for result in results)
    return {
        "ok": 0 < len(results) == passed,
        "passed": passed,
        "total": len(results),
        "cases": [result.to_dict() for result in results],
    }


def not_asked(suites: Sequence[Suite], settings: Settings, reason: str) -> dict[str, Any]:
    """The result of a gate that asked nothing."""
    cases, left_out = select(suites, settings.parsers)
    summary = summarize([Result(case, COULD_NOT_RUN, reason, "not asked") for case in cases])
    names = [suite.name for suite in suites]
    return {**summary, "seconds": 0.0, "suites": names, "bootstrap": settings.bootstrap, "left_out": left_out}


def describe(result: Mapping[str, Any]) -> str:
    """The result for people: the count, then each case that did not pass with prompt and answer."""
    lines = [f"coherence: {result['passed']} of {result['total']} cases passed"]
    for case in result["cases"]:
        if case["verdict"] != PASSED:
            lines.append(f"- {case['name']}: {case['verdict']}: {case['reason']}")
            lines.append(f"    prompt: {case['prompt'][:300]!r}")
            if case["answer"]:
                lines.append(f"    answer: {case['answer'][:300]!r}")
    return "\n".join(lines)


def _usage(usage: Usage | None) -> dict[str, int] | None:
    if usage is None:
        return None
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
