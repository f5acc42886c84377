"""A hub for tests: a real HTTP server with ranges, redirects, broken connections and LFS records."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


@dataclass
class Request:
    """What the server saw."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Server:
    """Serves `files` (path → bytes). Every knob is a fault that real hubs and networks show."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirect_to: str | None = None  # another server's URL, as hubs redirect to their content network
    token: str | None = None
    ranges: bool = True
    linked: bool = False  # X-Linked-* headers, as for files in LFS
    break_after: list[int] = field(default_factory=list)  # each GET of these sends so many bytes, then closes
    statuses: list[int] = field(default_factory=list)  # each GET answers so, 0: as usual
    later: bytes | None = None  # what every file is from the second GET on: a revision that moved
    pause: float = 0.0  # seconds between two MiB, for a download that can be looked at while it runs
    requests: list[Request] = field(default_factory=list)
    sent: int = 0

    def __enter__(self) -> Server:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def gets(self) -> list[Request]:
        return [request for request in self.requests if request.method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    hub: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:  # the name is the base class's
        self._answer(body=False)

    def do_GET(self) -> None:  # the name is the base class's
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub = self.hub
        hub.requests.append(Request(self.command, self.path, dict(self.headers)))
        content = hub.files.get(self.path.lstrip("/"))
        if hub.later is not None and len(hub.gets()) > 1:
            content = hub.later
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._end(401)
        status = hub.statuses.pop(0) if body and hub.statuses else 0
        if status:
            return self._end(status)
        if hub.redirect_to:
            linked = {}
            if hub.linked and content is not None:
                digest = hashlib.sha256(content).hexdigest()
                linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"'}
            return self._end(302, {"Location": hub.redirect_to + self.path, **linked})
        if content is None:
            return self._end(404)
        return self._send(content, body)

    def _send(self, content: bytes, body: bool) -> None:
        hub, start, status = self.hub, 0, 200
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        asked = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range", "")) if hub.ranges else None
        if asked and self.headers.get("If-Range", headers["ETag"]) == headers["ETag"]:
            start, status = int(asked[1]), 206
            if start >= len(content):
                return self._end(416, {"Content-Range": f"bytes */{len(content)}"})
            end = min(int(asked[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            content = content[:end]
        data = content[start:]
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return None
        if hub.break_after:
            data = data[: hub.break_after.pop(0)]
            self.close_connection = True
        for start in range(0, len(data), 1 << 20):
            block = data[start : start + (1 << 20)]
            try:
                self.wfile.write(block)
            except ConnectionError:  # a client that has seen enough
                break
            hub.sent += len(block)
            time.sleep(hub.pause)
        return None

    def _end(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
