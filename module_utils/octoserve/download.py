"""Downloads one file from a Hugging Face style hub: resumes, retries, hashes as it goes.

The hub answers `/<org>/<repo>/resolve/<revision>/<path>` with a redirect to a content network whose headers
X-Linked-Size and X-Linked-Etag hold size and SHA-256 of files that lie in LFS; other files come directly.
The token goes to the hub's own origin only. Needs `requests` (the tools venv has it).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from .digest import BLOCK, Hasher
from .job import WorkerError

MAX_REDIRECTS = 5
#: So many failures in a row, without new bytes between them, end a download.
MAX_FAILURES = 8
MAX_PAUSE = 60.0
TIMEOUT = (30, 90)  # seconds to connect, and between two packets
SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)\Z")
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_OK, _PARTIAL, _RANGE_NOT_SATISFIABLE = 200, 206, 416


class Interrupted(Exception):  # noqa: N818  # not an error: the download goes on
    """The transfer broke off; worth another try after `pause` seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        """Keep the reason."""
        super().__init__(reason)
        self.pause = pause


@dataclass(frozen=True)
class Record:
    """What the hub says of a file before it is fetched; None where it does not say."""

    size: int | None
    sha256: str | None


class _BearerToken(requests.auth.AuthBase):
    """Sends the token, and by being set keeps requests from looking into ~/.netrc."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.token:
            request.headers["Authorization"] = f"Bearer {self.token}"
        return request


class Hub:
    """HTTP with redirects followed by hand. Proxies come from the environment."""

    def __init__(self, token: str | None = None, backoff: float = 1.0) -> None:
        """Trust the certificates of the system, which hold those of a company's proxy.

        `backoff`: seconds before the second try, doubled before each further one.
        """
        self._token, self._backoff = token, backoff
        self._session = requests.Session()
        self._session.headers["Accept-Encoding"] = "identity"
        named = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
        if named or SYSTEM_CERTIFICATES.is_file():
            self._session.verify = named or str(SYSTEM_CERTIFICATES)

    def record(self, url: str) -> Record:
        """Ask for size and digest; a hub that does not answer HEAD gives none."""
        response = self._follow("HEAD", url, {}, until_linked=True)
        etag = response.headers.get("X-Linked-Etag", "").strip('"').lower()
        length = response.headers.get("X-Linked-Size", "")
        if response.status_code == _OK:
            length = length or response.headers.get("Content-Length", "")
        elif response.status_code in {401, 403, 404}:
            _refuse(url, response.status_code)
        return Record(int(length) if length.isdigit() else None, etag if _SHA256.match(etag) else None)

    def get(self, url: str, start: int, etag: str | None) -> requests.Response:
        """Return an open response for the bytes from `start`: status 200 (all), 206 or 416.

        Raises Interrupted for what may pass, WorkerError for what will not.
        """
        headers = {}
        if start:
            headers["Range"] = f"bytes={start}-"
            if etag and not etag.startswith("W/"):
                headers["If-Range"] = etag
        response = self._follow("GET", url, headers)
        status = response.status_code
        if status in {_OK, _PARTIAL, _RANGE_NOT_SATISFIABLE}:
            return response
        response.close()
        if status in _TRANSIENT:
            pause = response.headers.get("Retry-After", "")
            raise Interrupted(f"the server answers {status}", float(pause) if pause.isdigit() else 0.0)
        _refuse(url, status)
        raise AssertionError

    def read(self, url: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`; raise WorkerError after MAX_FAILURES."""
        for failures in range(MAX_FAILURES + 1):
            try:
                return self._read_once(url, start, end)
            except Interrupted as reason:
                last = reason
                self.pause(failures, reason)
        raise WorkerError(f"{url}: gave up after {MAX_FAILURES + 1} failures in a row: {last}")

    def pause(self, failures: int, reason: Interrupted) -> None:
        """Wait before another try, after so many failures before this one."""
        time.sleep(min(MAX_PAUSE, max(reason.pause, self._backoff * 2**failures)))

    def _read_once(self, url: str, start: int, end: int) -> bytes:
        with self._follow("GET", url, {"Range": f"bytes={start}-{end - 1}"}) as response:
            if response.status_code in _TRANSIENT:
                raise Interrupted(f"the server answers {response.status_code}")
            if response.status_code == _OK:
                raise WorkerError(f"{url}: the server gives no parts of files; fetch the splits instead")
            if response.status_code != _PARTIAL:
                _refuse(url, response.status_code)
            try:
                return response.content
            except requests.RequestException as error:
                raise Interrupted(str(error)) from error

    def _follow(self, method: str, url: str, headers: dict[str, str], until_linked: bool = False) -> requests.Response:
        """Send a request, follow redirects; with `until_linked` only up to the hub's record of the file."""
        origin, here = _origin(url), url
        for _ in range(MAX_REDIRECTS + 1):
            auth = _BearerToken(self._token if _origin(here) == origin else None)
            try:
                response = self._session.request(
                    method, here, headers=headers, auth=auth, stream=True, allow_redirects=False, timeout=TIMEOUT
                )
            except requests.RequestException as error:
                raise Interrupted(f"{urlsplit(here).netloc}: {error}") from error
            if not response.is_redirect or (until_linked and "X-Linked-Etag" in response.headers):
                return response
            response.close()
            target = urljoin(here, response.headers["Location"])
            if urlsplit(target).scheme not in {"https", urlsplit(here).scheme}:
                raise WorkerError(f"{url}: redirected from https to {urlsplit(target).scheme}; refused")
            here = target
        raise WorkerError(f"{url}: more than {MAX_REDIRECTS} redirects, last to {urlsplit(here).netloc}")


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _refuse(url: str, status: int) -> None:
    cause = {
        401: "a token is needed, or this one is not valid",
        403: "this token has no access; is the licence accepted on the hub?",
        404: "there is no such file; check organisation, repository, revision and path",
    }.get(status, "the server refuses")
    raise WorkerError(f"{url}: HTTP {status}: {cause}")


class Part:
    """An unfinished file that grows and is hashed as it grows. What is there already is hashed first."""

    def __init__(self, path: Path, size: int | None, hashed: Callable[[int], None]) -> None:
        """Open or make the file; one longer than `size` starts from nothing."""
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._hasher = Hasher()
        self.size = 0
        self.resumed = 0
        found = path.stat().st_size
        if size is not None and found > size:
            self._file.truncate(0)
            found = 0
        if found:
            self._read_prefix(found, hashed)

    def __enter__(self) -> Part:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file, which stays for a later run."""
        self._hasher.__exit__(kind, error, trace)
        self._file.close()

    def _read_prefix(self, size: int, hashed: Callable[[int], None]) -> None:
        with self.path.open("rb") as file:
            while self.size < size:
                block = file.read(BLOCK)
                self._hasher.update(block)
                self.size += len(block)
                hashed(self.size)
        self.resumed = self.size

    def write(self, block: bytes) -> None:
        """Append; hashing goes on meanwhile."""
        self._hasher.update(block)
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) :]
        self.size += len(block)

    def restart(self) -> None:
        """Begin again with nothing."""
        self._file.truncate(0)
        self._hasher.__exit__(None, None, None)
        self._hasher = Hasher()
        self.size = self.resumed = 0

    def finish(self) -> str:
        """Wait for the disk, return the digest of the whole file."""
        os.fsync(self._file.fileno())
        return self._hasher.hexdigest()


@dataclass
class Transfer:
    """Fetches what a part lacks. `arrived` is told the part's size as it grows.

    Failures in a row wait ever longer, at most MAX_PAUSE seconds.
    """

    hub: Hub
    url: str
    part: Part
    size: int | None
    arrived: Callable[[int], None]
    _etag: str | None = field(default=None, init=False)

    def run(self) -> None:
        """Fetch to the end; raise WorkerError after MAX_FAILURES or where trying again is of no use."""
        failures = 0
        while self.size is None or self.part.size < self.size:
            before = self.part.size
            try:
                self._once()
            except Interrupted as reason:
                failures = 1 if self.part.size > before else failures + 1
                if failures > MAX_FAILURES:
                    raise WorkerError(
                        f"{self.url}: gave up after {failures} failures in a row at byte {self.part.size}: {reason}; "
                        "what has arrived is kept, run again to resume"
                    ) from reason
                self.hub.pause(failures - 1, reason)
                continue
            if self.size is None:
                return

    def _once(self) -> None:
        """Fetch until the end or the first break."""
        with self.hub.get(self.url, self.part.size, self._etag) as response:
            if response.status_code == _RANGE_NOT_SATISFIABLE:
                self.part.restart()
                raise Interrupted("the server has fewer bytes than have arrived")
            start = _start_of(response, self.url, self.size)
            if start != self.part.size:
                self.part.restart()
                if start:
                    raise Interrupted(f"the server sent bytes from {start} on, which were not asked for")
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else None
            if self.size is not None and total not in {None, self.size}:
                raise WorkerError(f"{self.url}: the server offers {total} bytes, wanted {self.size}; another revision?")
            self._etag = response.headers.get("ETag")
            self._receive(response, total if self.size is None else self.size)

    def _receive(self, response: requests.Response, wanted: int | None) -> None:
        self.arrived(self.part.size)
        try:
            # read1 returns what has come, so that nothing of it is lost when the connection breaks.
            while block := response.raw.read1(BLOCK):
                self.part.write(block)
                self.arrived(self.part.size)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Interrupted(str(error)) from error
        found = self.part.size
        if wanted is not None and found < wanted:
            raise Interrupted(f"the connection ended after {found} of {wanted} bytes")
        if wanted is not None and found > wanted:
            self.part.restart()
            raise WorkerError(f"{self.url}: the server sent {found} bytes, wanted {wanted}")


def _start_of(response: requests.Response, url: str, size: int | None) -> int:
    """Return the position of the first byte that the response carries."""
    if response.status_code == _OK:
        return 0
    match = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    if not match:
        raise WorkerError(f"{url}: HTTP 206 without a usable Content-Range; fetch it by other means")
    if size is not None and match[2] not in {"*", str(size)}:
        raise WorkerError(f"{url}: the server's file has {match[2]} bytes, wanted {size}; another revision?")
    return int(match[1])
