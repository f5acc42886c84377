"""Client of an OpenAI-compatible server: chat and text completions, whole or streamed with arrival times.

What only vLLM has beyond OpenAI's interface (token ids, log probabilities of the prompt, ``/tokenize``) is asked for by
the methods that say so.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests
import urllib3

CONNECT_TIMEOUT_S = 10.0
ERROR_BODY_CHARS = 500
READ_BYTES = 65536
HTTP_OK = 200
# Statuses by which a server refuses a key.
NO_ACCESS = (401, 403)
CHECK_KEY = "check octoserve_api_key"

Message = Mapping[str, Any]
Body = dict[str, Any]


class ApiError(Exception):
    """A request that brought no usable answer.

    ``status`` is the HTTP status, None where no response came; ``body`` an excerpt of the response. Neither
    holds the API key. ``retry_after``: seconds that a full server asks to wait, None where it does not say.
    """

    def __init__(
        self, url: str, reason: str, status: int | None = None, body: str = "", retry_after: float | None = None
    ) -> None:
        self.url, self.reason, self.status, self.body, self.retry_after = url, reason, status, body, retry_after
        super().__init__(f"{url}: {reason}" + (f": {body}" if body else ""))


@dataclass(frozen=True)
class Usage:
    """Token counts as the server states them."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Token:
    """One token of an answer: its text, its log probability and those of the likeliest texts (nats)."""

    text: str
    logprob: float
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """One event of a stream, ``at`` seconds after the request was sent."""

    at: float
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Body, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    tokens: tuple[Token, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One finished answer. ``seconds`` runs from sending the request to the last byte.

    ``tokens`` are there where log probabilities were asked for, the ids where ``return_token_ids`` was.
    """

    text: str
    seconds: float
    reasoning: str = ""
    tool_calls: tuple[Body, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    tokens: tuple[Token, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    raw: Body = field(default_factory=dict)


def sse_payloads(lines: Iterable[str]) -> Iterator[str]:
    """Yield the data of each server-sent event up to ``[DONE]``.

    Comments and other fields are skipped, several ``data`` lines of one event joined with newlines, as in
    the HTML standard, section "Server-sent events". Raises EOFError where the lines end before ``[DONE]``:
    the stream died, whatever came before.
    """
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            payload, data = "\n".join(data), []
            if payload.strip() == "[DONE]":
                return
            yield payload
    if "\n".join(data).strip() != "[DONE]":  # some servers leave out the empty line after the last event
        raise EOFError("the stream ended before [DONE]")


def split_lines(blocks: Iterable[bytes]) -> Iterator[str]:
    """Cut bytes as they arrive into lines, without their ends (LF or CRLF). Raises UnicodeDecodeError."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()


def parse_usage(value: Any) -> Usage | None:
    """Read a ``usage`` object; None where the server sent none or one without numbers."""
    if not isinstance(value, dict):
        return None
    prompt, completion = value.get("prompt_tokens"), value.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    return Usage(prompt, completion)


def parse_chunk(payload: str, at: float) -> Chunk:
    """Read one event of a chat or text completion stream.

    An event without choices (the last one, with ``usage``) and one without text (the first one, with the
    role) are chunks with empty text. Raises ValueError where the payload is an error object or no chunk.
    """
    event = json.loads(payload)
    if not isinstance(event, dict) or event.get("error"):
        raise ValueError(f"the server sent an error in the stream: {payload[:ERROR_BODY_CHARS]}")
    usage = parse_usage(event.get("usage"))
    prompt_ids = tuple(event.get("prompt_token_ids") or ())
    choices = event.get("choices") or []
    if not choices:
        return Chunk(at, usage=usage, prompt_token_ids=prompt_ids)
    delta = choices[0].get("delta") or {}
    return Chunk(
        at,
        text=delta.get("content") or choices[0].get("text") or "",
        reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
        tool_calls=tuple(delta.get("tool_calls") or ()),
        finish_reason=choices[0].get("finish_reason"),
        usage=usage,
        tokens=parse_tokens(choices[0].get("logprobs")),
        token_ids=tuple(choices[0].get("token_ids") or ()),
        prompt_token_ids=prompt_ids,
    )


def parse_tokens(logprobs: Any) -> tuple[Token, ...]:
    """Read the ``logprobs`` of a chat completion's choice; empty where there are none."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return tuple(
        Token(str(entry["token"]), float(entry["logprob"]), _likeliest(entry.get("top_logprobs") or ()))
        for entry in content or ()
    )


def _likeliest(alternatives: Iterable[Body]) -> dict[str, float]:
    """Log probability of each text; of two tokens with one text (bytes of a character), the likelier."""
    found: dict[str, float] = {}
    for other in alternatives:
        text = str(other["token"])
        found[text] = max(float(other["logprob"]), found.get(text, -math.inf))
    return found


def merge_tool_calls(deltas: Iterable[Body]) -> tuple[Body, ...]:
    """Put the pieces of a stream's tool calls together: same ``index``, same call; arguments come in pieces."""
    calls: dict[int, Body] = {}
    for delta in deltas:
        call = calls.setdefault(int(delta.get("index") or 0), {"function": {"name": "", "arguments": ""}})
        call.update({key: value for key, value in delta.items() if key not in ("index", "function") and value})
        for key, value in (delta.get("function") or {}).items():
            call["function"][key] = call["function"].get(key, "") + (value or "")
    return tuple(calls[index] for index in sorted(calls))


def parse_completion(payload: str, seconds: float) -> Completion:
    """Read the body of a non-streaming chat or text completion. Raises ValueError where it is none."""
    body = json.loads(payload)
    if not isinstance(body, dict) or not body.get("choices"):
        raise ValueError("the answer holds no choices")
    choice = body["choices"][0]
    message = choice.get("message") or {}
    return Completion(
        text=message.get("content") or choice.get("text") or "",
        seconds=seconds,
        reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
        tool_calls=tuple(message.get("tool_calls") or ()),
        finish_reason=choice.get("finish_reason"),
        usage=parse_usage(body.get("usage")),
        tokens=parse_tokens(choice.get("logprobs")) if message else (),
        token_ids=tuple(choice.get("token_ids") or ()),
        prompt_token_ids=tuple(body.get("prompt_token_ids") or ()),
        raw=body,
    )


def join_chunks(chunks: Sequence[Chunk]) -> Completion:
    """Put the chunks of one stream together. ``usage`` and the finish reason are the last ones sent."""
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        seconds=chunks[-1].at if chunks else 0.0,
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=merge_tool_calls(call for chunk in chunks for call in chunk.tool_calls),
        finish_reason=next((c.finish_reason for c in reversed(chunks) if c.finish_reason), None),
        usage=next((c.usage for c in reversed(chunks) if c.usage), None),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        token_ids=tuple(number for chunk in chunks for number in chunk.token_ids),
        prompt_token_ids=next((c.prompt_token_ids for c in chunks if c.prompt_token_ids), ()),
    )


def _seconds(header: str | None) -> float | None:
    """A Retry-After header in seconds; None where it is missing or a date, which no inference server sends."""
    return float(header) if header is not None and header.isdecimal() else None


class Client:
    """Requests to one server. Safe to share between threads: each request has a session of its own.

    ``base_url`` is the root (``http://127.0.0.1:8000``), with or without ``/v1``. Without ``model`` the first
    one that the server lists is asked. ``timeout`` bounds a whole request in seconds, plus at most as much
    again where the server falls silent in the middle of it. Proxies and .netrc of the environment are
    ignored: they belong to downloads, not to a service on this host.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self._model = model or None
        self._api_key = api_key or None

    def within(self, timeout: float) -> Client:
        """The same client with another bound on a request. Raises ApiError where the model has to be asked for."""
        return Client(self.base_url, self.model, self._api_key, timeout)

    def with_timeout(self, timeout: float) -> Client:
        """The same server, asked with another patience (s)."""
        return Client(self.base_url, self._model, self._api_key, timeout)

    @property
    def model(self) -> str:
        """The model's name. Raises ApiError where it has to be asked for and no model is served."""
        if self._model is None:
            names = self.models()
            if not names:
                raise ApiError(f"{self.base_url}/v1/models", "the server lists no model")
            self._model = names[0]
        return self._model

    def models(self) -> list[str]:
        """Names of the served models, in the server's order. Raises ApiError."""
        return [str(entry["id"]) for entry in self._models()]

    def max_model_len(self) -> int | None:
        """Longest context that the model is served with, in tokens; None where the server does not say it.

        Raises ApiError. vLLM says it in its list of models.
        """
        found = [entry.get("max_model_len") for entry in self._models() if entry["id"] == self.model]
        return found[0] if found and isinstance(found[0], int) else None

    def _models(self) -> list[Body]:
        url, text, _ = self._whole("GET", "/v1/models", None)
        try:
            return [{**entry, "id": entry["id"]} for entry in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(url, "not a list of models", HTTP_OK, self._excerpt(text)) from error

    def tokenize(self, **request: Any) -> list[int]:
        """Token ids of ``prompt=`` (a text) or of ``messages=`` in the chat template. vLLM only. Raises ApiError."""
        url, text, _ = self._whole("POST", "/tokenize", {"model": self.model, **request})
        try:
            return [int(token) for token in json.loads(text)["tokens"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(url, "not a list of tokens", HTTP_OK, self._excerpt(text)) from error

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log probability (nats) of each token but the first, given those before it. vLLM only. Raises ApiError.

        One that is no number is NaN.
        vLLM computes them anew each time: such a request reads nothing from the prefix cache.
        """
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        url, text, _ = self._whole("POST", "/v1/completions", {"model": self.model, **body})
        try:
            found = json.loads(text)["choices"][0]["prompt_logprobs"]
            values = [found[at][str(token_ids[at])]["logprob"] for at in range(1, len(token_ids))]
            return [math.nan if value is None else float(value) for value in values]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            reason = f"no log probability of each of the {len(token_ids)} tokens of the prompt ({error!r})"
            raise ApiError(url, reason, HTTP_OK, self._excerpt(text)) from error

    def chat(self, messages: Sequence[Message], max_tokens: int | None, **options: Any) -> Completion:
        """One chat completion at temperature 0, not streamed. ``options`` go into the request as they are.

        ``max_tokens`` None: as many as the context holds. Raises ApiError.
        """
        return self._completion("/v1/chat/completions", self._chat_body(messages, max_tokens, options))

    def completion(self, prompt: str, max_tokens: int, **options: Any) -> Completion:
        """One text completion at temperature 0, not streamed. Raises ApiError."""
        return self._completion("/v1/completions", self._body(max_tokens, options, prompt=prompt))

    def stream_chat(self, messages: Sequence[Message], max_tokens: int | None, **options: Any) -> list[Chunk]:
        """One streamed chat completion at temperature 0 with usage, as its chunks with their arrival times.

        Raises ApiError, also where the stream dies before ``[DONE]``.
        """
        return list(self.chunks(messages, max_tokens, **options))

    def chunks(self, messages: Sequence[Message], max_tokens: int | None, **options: Any) -> Iterator[Chunk]:
        """The same, each chunk as it arrives."""
        body = self._chat_body(messages, max_tokens, options)
        body.update(stream=True, stream_options={"include_usage": True})
        url = self.base_url + "/v1/chat/completions"
        started = time.monotonic()
        count = 0
        lines = split_lines(self._blocks("POST", url, body))
        try:
            for payload in sse_payloads(lines):
                yield parse_chunk(payload, time.monotonic() - started)
                count += 1
            for _ in lines:  # to the end of the response, or the server logs an aborted request
                pass
        except (EOFError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise ApiError(url, self._excerpt(f"broken stream after {count} chunks: {error}"), HTTP_OK) from error

    def _chat_body(self, messages: Sequence[Message], max_tokens: int | None, options: Mapping[str, Any]) -> Body:
        return self._body(max_tokens, options, messages=list(messages))

    def _body(self, max_tokens: int | None, options: Mapping[str, Any], **fields: Any) -> Body:
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        return {"model": self.model, **fields, **limit, "temperature": 0.0, **options}

    def _completion(self, path: str, body: Body) -> Completion:
        url, text, seconds = self._whole("POST", path, body)
        try:
            return parse_completion(text, seconds)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ApiError(url, f"not a completion ({error})", HTTP_OK, self._excerpt(text)) from error

    def _whole(self, method: str, path: str, body: Body | None) -> tuple[str, str, float]:
        url = self.base_url + path
        started = time.monotonic()
        text = b"".join(self._blocks(method, url, body)).decode(errors="replace")
        return url, text, time.monotonic() - started

    def _blocks(self, method: str, url: str, body: Body | None) -> Iterator[bytes]:
        """Send one request and yield the response's bytes as they arrive. Raises ApiError."""
        # Compression would hold tokens back until a block is full.
        headers = {"Accept-Encoding": "identity"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        deadline = time.monotonic() + self.timeout
        with requests.Session() as session:
            session.trust_env = False
            try:
                response = session.request(
                    method,
                    url,
                    json=body,
                    headers=headers,
                    stream=True,
                    allow_redirects=False,
                    timeout=(min(CONNECT_TIMEOUT_S, self.timeout), self.timeout),
                )
                if response.status_code != HTTP_OK:
                    text = response.raw.read(READ_BYTES).decode(errors="replace")
                    advice = f" ({CHECK_KEY})" if response.status_code in NO_ACCESS else ""
                    reason = f"HTTP {response.status_code} {response.reason}{advice}"
                    wait = _seconds(response.headers.get("Retry-After"))
                    raise ApiError(url, reason, response.status_code, self._excerpt(text), wait)
                # read1 hands over what has arrived; requests' own iterators wait until a block is full.
                while block := response.raw.read1(READ_BYTES):
                    yield block
                    if time.monotonic() > deadline:
                        raise ApiError(url, f"no end of the answer within {self.timeout:g} s", HTTP_OK)
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                raise ApiError(url, self._excerpt(f"{type(error).__name__}: {error}")) from error

    def _excerpt(self, text: str) -> str:
        """Cut and clean what goes into an error: a server may well echo the key that it refuses."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return text.strip()[:ERROR_BODY_CHARS]
