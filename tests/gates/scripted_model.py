"""A scripted, fake language model behind vLLM's HTTP interface: it answers from a table and can be made to misbehave.

It stands for what no small real model shows: long contexts, long answers, tools, reasoning, and servers whose buffers
are stale. A token is a word with the blank before it, a number or a line end; its log probability is a hash of it and
of the two tokens before, so that decoding, prefill and every load agree while the model is healthy.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from fake_openai_server import EventHandler, QuietServer

Body = dict[str, Any]
END = "<end>"
TOKEN = re.compile(r"\n| ?[^\s]+|\s")


@dataclass(frozen=True)
class Answer:
    """What the model says to one request, before the server makes events of it."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Body, ...] = ()
    finish_reason: str = "stop"
    logprob_shift: float = 0.0  # of every decoded token, nats
    events: tuple[str, ...] | None = None  # what is streamed; None: a token an event
    counted: int = 1  # how often `usage` counts each token of the answer
    stream_tool_calls: tuple[Body, ...] | None = None  # what is streamed instead of the calls


@dataclass
class Seen:
    """What a script may look at beside the request: how many are under way, and the answer before this one."""

    under_way: int = 0
    last: Answer = field(default_factory=Answer)


Script = Callable[[Body, Seen], Answer]
Shift = Callable[[Sequence[str], Seen], float]


def tokens_of(text: str) -> list[str]:
    """The tokens of a text."""
    return TOKEN.findall(text)


def logprob(before: Sequence[str], token: str) -> float:
    """Log probability of a token, nats, between -0.5 and 0: a perplexity of about 1.28."""
    return -0.5 * (crc32("\0".join([*before[-2:], token]).encode()) % 997) / 997


def prompt_tokens(body: Body) -> list[str]:
    """Messages in the fake model's template."""
    parts = [f"<{m['role']}> {m.get('content') or json.dumps(m.get('tool_calls'))}\n" for m in body["messages"]]
    return [*tokens_of("".join(parts)), "<assistant>"]


class ScriptedModel:
    """``with ScriptedModel(script).serve() as url``; ``score_shift`` is added to log probabilities of prompts."""

    def __init__(
        self, script: Script, max_model_len: int = 40000, score_shift: Shift = lambda _tokens, _seen: 0.0
    ) -> None:
        self.script, self.max_model_len, self.score_shift = script, max_model_len, score_shift
        self.seen = Seen()
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self._words: dict[int, str] = {}

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """Numbers of tokens; new ones get the next number."""
        with self._lock:
            found = [self._ids.setdefault(token, len(self._ids)) for token in tokens]
            self._words.update(zip(found, tokens))
            return found

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve on a free port of the loopback interface until the block ends."""
        server = QuietServer(("127.0.0.1", 0), self.handler())
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as under way until it is answered."""
        with self._lock:
            self.seen.under_way += 1
        try:
            time.sleep(0.005)  # so that requests of several clients overlap
            yield
        finally:
            with self._lock:
                self.seen.under_way -= 1

    def answer(self, body: Body) -> Answer:
        """Ask the script."""
        with self._lock:
            seen = replace(self.seen)
        made = self.script(body, seen)
        with self._lock:
            self.seen.last = made
        return made

    def tokenize(self, body: Body) -> Body:
        """vLLM's /tokenize."""
        tokens = prompt_tokens(body) if "messages" in body else tokens_of(body["prompt"])
        return {"tokens": self.ids(tokens), "count": len(tokens), "max_model_len": self.max_model_len}

    def score(self, body: Body) -> Body:
        """A text completion that asks for nothing but the log probabilities of its prompt."""
        with self._lock:
            tokens = [self._words[number] for number in body["prompt"]]
            seen = replace(self.seen)
        shift = self.score_shift(tokens, seen)
        entries: list[Any] = [None]
        for at in range(1, len(tokens)):
            value = logprob(tokens[:at], tokens[at]) + shift
            entries.append({str(body["prompt"][at]): {"logprob": value if math.isfinite(value) else None}})
        return {"choices": [{"text": "", "prompt_logprobs": entries, "finish_reason": "length"}]}

    def entries(self, body: Body, answer: Answer, events: Sequence[str] | None = None) -> list[Body]:
        """The ``logprobs`` of an answer's tokens (or of the events that a stream makes of them) and its end."""
        before = prompt_tokens(body)
        made = []
        said = tokens_of(answer.text) if events is None else events
        for token in [*tokens_of(answer.reasoning), *said, END]:
            value = logprob(before, token) + answer.logprob_shift
            top = [{"token": token, "logprob": value}, {"token": " other", "logprob": value - 5}]
            made.append({"token": token, "logprob": value, "top_logprobs": top})
            before.append(token)
        return made

    def whole(self, body: Body) -> Body:
        """A chat completion that is not streamed."""
        answer = self.answer(body)
        calls = list(answer.tool_calls)
        message = {"role": "assistant", "content": answer.text, "reasoning": answer.reasoning, "tool_calls": calls}
        choice: Body = {"message": message, "finish_reason": answer.finish_reason}
        found: Body = {"choices": [choice], "usage": self.usage(body, answer)}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": self.entries(body, answer)}
            choice["token_ids"] = self.ids([*tokens_of(answer.reasoning), *tokens_of(answer.text), END])
            found["prompt_token_ids"] = self.ids(prompt_tokens(body))
        return found

    def events(self, body: Body) -> Iterator[Body]:
        """The events of a streamed chat completion."""
        answer = self.answer(body)
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        events = tokens_of(answer.text) if answer.events is None else answer.events
        entries = self.entries(body, answer, events) if body.get("logprobs") else []
        thoughts = tokens_of(answer.reasoning)
        for word, entry in itertools.zip_longest(thoughts, entries[: len(thoughts)]):
            yield {"choices": [self.choice({"reasoning": word}, word, entry)]}
        calls = answer.tool_calls if answer.stream_tool_calls is None else answer.stream_tool_calls
        for index, call in enumerate(calls):
            arguments = call["function"]["arguments"]
            half = len(arguments) // 2
            head = {
                **call,
                "index": index,
                "function": {"name": call["function"]["name"], "arguments": arguments[:half]},
            }
            yield {"choices": [{"delta": {"tool_calls": [head]}}]}
            yield {
                "choices": [{"delta": {"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]}}]
            }
        for event, entry in itertools.zip_longest(events, entries[len(thoughts) : -1]):
            yield {"choices": [self.choice({"content": event}, event, entry)]}
        last: Body = {"delta": {}, "finish_reason": answer.finish_reason}
        if entries:
            last.update(logprobs={"content": entries[-1:]}, token_ids=self.ids([END]))
        yield {"choices": [last]}
        yield {"choices": [], "usage": self.usage(body, answer)}

    def choice(self, delta: Body, token: str, entry: Body | None) -> Body:
        """One event's choice, with its token's log probability where it was asked for."""
        return {"delta": delta, **({"logprobs": {"content": [entry]}, "token_ids": self.ids([token])} if entry else {})}

    @staticmethod
    def usage(body: Body, answer: Answer) -> Body:
        """Token counts, the end of the answer among them."""
        made = len(tokens_of(answer.text)) + len(tokens_of(answer.reasoning)) + 20 * len(answer.tool_calls) + 1
        return {"prompt_tokens": len(prompt_tokens(body)), "completion_tokens": made * answer.counted}

    def handler(self) -> type[EventHandler]:
        """Its HTTP interface."""
        model = self

        class Handler(EventHandler):
            def answer_get(self) -> None:
                self._whole({"data": [{"id": "scripted", "max_model_len": model.max_model_len}]})

            def answer_post(self, body: Body) -> None:
                with model.request():
                    self._answer(body)

            def _answer(self, body: Body) -> None:
                if self.path == "/tokenize":
                    self._whole(model.tokenize(body))
                elif self.path == "/v1/completions":
                    self._whole(model.score(body))
                elif body.get("stream"):
                    self._stream(model.events(body), 0.002 if body.get("ignore_eos") else 0.0)
                else:
                    self._whole(model.whole(body))

            def _whole(self, content: Body) -> None:
                self.send(200, json.dumps(content).encode())

            def _stream(self, events: Iterator[Body], pause_s: float) -> None:
                self.begin_stream()
                for event in events:
                    time.sleep(pause_s)
                    self.event(event)
                self.end_stream()

        return Handler
