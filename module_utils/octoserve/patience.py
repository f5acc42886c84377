"""Ask a full server again: it says so and when to come again, and is believed a few times."""

from __future__ import annotations

import time
from typing import Callable, TypeVar

from .openai_api import ApiError

BUSY = (429, 503)
MAX_TRIES = 3
MAX_RETRY_WAIT_S = 10.0
DEFAULT_RETRY_WAIT_S = 1.0

Found = TypeVar("Found")


def retry_wait_s(error: ApiError) -> float:
    """Seconds to wait before the next try: what the server asked for, within bounds."""
    wanted = DEFAULT_RETRY_WAIT_S if error.retry_after is None else error.retry_after
    return min(max(wanted, 0.0), MAX_RETRY_WAIT_S)


def patiently(ask: Callable[[], Found], sleep: Callable[[float], None] = time.sleep) -> tuple[Found, int]:
    """What ``ask`` returns, and how often it was asked again after 429 or 503. Raises ApiError."""
    retries = 0
    while True:
        try:
            return ask(), retries
        except ApiError as error:
            retries += 1
            if error.status not in BUSY or retries >= MAX_TRIES:
                raise
            sleep(retry_wait_s(error))
