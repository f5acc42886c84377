"""A scripted, fake OpenAI server on a real socket: it knows no model, only the replies that a test gives it."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Body = dict[str, Any]
COUNT = "\n".join(str(number) for number in range(1, 51))


@dataclass(frozen=True)
class Reply:
    """One answer. A token of the text is a number, a word with the blank before it, or a line end."""

    text: str = ""
    reasoning: str = ""
    status: int = 200
    ttft_s: float = 0.0
    token_s: float = 0.0005
    tokens_per_chunk: int = 1
    empty_first_chunk: bool = True
    comments: bool = False
    die_after: int | None = None  # tokens sent before the connection is cut
    error_after: int | None = None  # tokens sent before an error object comes in the stream
    finish_reason: str = "stop"
    send_usage: bool = True
    usage_delay_s: float = 0.0  # between the last token and `usage`
    prompt_tokens: int = 7
    completion_tokens: int | None = None  # what `usage` claims; None: the truth, with an end token as vLLM does
    headers: dict[str, str] = field(default_factory=dict)  # of a refusal
    raw_body: bytes | None = None  # sent as it is instead of everything else
    message: Body = field(default_factory=dict)  # further fields of the message

    @property
    def tokens(self) -> list[str]:
        return re.findall(r"\n| ?[^\s]+|\s", self.text)

    @property
    def usage(self) -> Body:
        claimed = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens) + 1 if claimed is None else claimed,
        }


def wait_until(due: float) -> None:
    time.sleep(max(0.0, due - time.monotonic()))


Script = Callable[[Body], Reply]


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be silent where the client hung up: tests of broken streams and timeouts do that on purpose."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class EventHandler(BaseHTTPRequestHandler):
    """What fake servers share: whole answers, and streams of events that leave at once."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer_get()

    def do_POST(self) -> None:
        self.answer_post(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer_get(self) -> None:
        raise NotImplementedError

    def answer_post(self, body: Body) -> None:
        raise NotImplementedError

    def send(self, status: int, payload: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, event: Body) -> None:
        self.raw(f"data: {json.dumps(event)}\n\n".encode())

    def raw(self, payload: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))

    def end_stream(self) -> None:
        self.raw(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")


class FakeOpenAiServer:
    """``with FakeOpenAiServer(script) as server``: serves until the block ends; ``requests`` keeps the bodies."""

    def __init__(
        self, script: Script | Reply, models: tuple[str, ...] = ("fake",), max_model_len: int | None = None
    ) -> None:
        self.script: Script = script if callable(script) else lambda _body: script
        self.models = [{"id": name, "max_model_len": max_model_len} for name in models]
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        # Of each stream: when its request was read, then when each event with a token was sent (monotonic, s).
        self.sent: list[list[float]] = []
        self._server = QuietServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeOpenAiServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[EventHandler]:
        fake = self

        class Handler(EventHandler):
            def answer_get(self) -> None:
                self.send(200, json.dumps({"data": fake.models}).encode())

            def answer_post(self, body: Body) -> None:
                fake.requests.append(body)
                fake.headers.append(dict(self.headers))
                reply = fake.script(body)
                if reply.raw_body is not None:
                    self.send(reply.status, reply.raw_body)
                elif reply.status != 200:
                    error = {"message": f"refused, key was {self.headers['Authorization']}"}
                    self.send(reply.status, json.dumps({"error": error}).encode(), reply.headers)
                elif body.get("stream"):
                    self._stream(reply)
                else:
                    self._whole(reply)

            def _whole(self, reply: Reply) -> None:
                time.sleep(reply.ttft_s + reply.token_s * len(reply.tokens))
                message = {"role": "assistant", "content": reply.text, **reply.message}
                choice = {"message": message, "text": reply.text, "finish_reason": reply.finish_reason}
                answer: Body = {"choices": [choice]}
                if reply.send_usage:
                    answer["usage"] = reply.usage
                self.send(200, json.dumps(answer).encode())

            def _stream(self, reply: Reply) -> None:
                started = time.monotonic()
                sent = [started]
                fake.sent.append(sent)
                self.begin_stream()
                if reply.empty_first_chunk:
                    self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                if reply.reasoning:
                    self.event({"choices": [{"delta": {"reasoning": reply.reasoning}}]})
                tokens = reply.tokens
                for first in range(0, len(tokens), reply.tokens_per_chunk):
                    # The moment of the chunk's last token, on one clock: delays do not add up.
                    last = min(first + reply.tokens_per_chunk, len(tokens))
                    wait_until(started + reply.ttft_s + reply.token_s * (last - 1))
                    if reply.die_after is not None and first >= reply.die_after:
                        self.close_connection = True
                        self.connection.shutdown(2)
                        return
                    if reply.error_after is not None and first >= reply.error_after:
                        self.event({"error": {"message": "engine died", "code": 500}})
                    if reply.comments:
                        self.raw(b": keep-alive\r\n\r\n")
                    sent.append(time.monotonic())
                    self.event({"choices": [{"delta": {"content": "".join(tokens[first:last])}}]})
                wait_until(started + reply.ttft_s + reply.token_s * len(tokens))  # the end token
                sent.append(time.monotonic())
                self.event({"choices": [{"delta": {}, "finish_reason": reply.finish_reason}]})
                if reply.send_usage:
                    time.sleep(reply.usage_delay_s)
                    self.event({"choices": [], "usage": reply.usage})
                self.end_stream()

        return Handler
