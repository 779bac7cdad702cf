"""How often what may pass is tried again."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TypeVar

from draftline_server.errors import FetchError
from draftline_server.fetch.source import TemporaryFetchError
from draftline_server.log import log_event

Pause = Callable[[float], object]
Result = TypeVar("Result")

MAX_TRIES = 6

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 120.0

_logger = logging.getLogger(__name__)


class Retries:
    """Counts failures since the last progress; the pause doubles with each."""

    def __init__(self, what: str, pause: Pause) -> None:
        self._what = what
        self._pause = pause
        self._failures = 0

    def note_progress(self) -> None:
        self._failures = 0

    def note_failure(self, error: TemporaryFetchError) -> None:
        """Waits, or raises `FetchError` when it has happened too often."""
        self._failures += 1
        if self._failures >= MAX_TRIES:
            raise FetchError(f"{self._what}: gave up after {self._failures} tries: {error}") from error
        pause_seconds = _FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1) * random.uniform(0.75, 1.25)
        pause_seconds = min(max(pause_seconds, error.retry_after_seconds), _LONGEST_PAUSE_SECONDS)
        log_event(
            _logger,
            logging.WARNING,
            "fetch was interrupted and will be continued",
            what=self._what,
            reason=str(error),
            pause_seconds=pause_seconds,
        )
        self._pause(pause_seconds)


def with_retries(what: str, action: Callable[[], Result], pause: Pause) -> Result:
    """The result of `action`, tried again after a `TemporaryFetchError`."""
    retries = Retries(what, pause)
    while True:
        try:
            return action()
        except TemporaryFetchError as error:
            retries.note_failure(error)
