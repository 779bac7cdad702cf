"""How far a fetch is, as lines in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from draftline_server.log import log_event

_logger = logging.getLogger(__name__)


class Progress:
    """Counts bytes from several threads."""

    def __init__(self, uri: str, *, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._uri = uri
        self._total_bytes = total_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._moved_bytes = 0
        self._last = (clock(), 0)

    def add(self, size: int) -> None:
        """Bytes that have come."""
        with self._lock:
            self._done_bytes += size
            self._moved_bytes += size

    def skip(self, size: int) -> None:
        """Bytes that were here before; negative for those that were thrown away."""
        with self._lock:
            self._done_bytes += size

    def log(self) -> None:
        """One line; the rate is that since the line before."""
        with self._lock:
            now, moved = self._clock(), self._moved_bytes
            (then, moved_then), self._last = self._last, (now, moved)
            done = self._done_bytes
        log_event(
            _logger,
            logging.INFO,
            "part of the model was fetched",
            uri=self._uri,
            bytes=done,
            total_bytes=self._total_bytes,
            percent=round(100 * done / self._total_bytes, 1) if self._total_bytes else 100.0,
            bytes_per_second=round((moved - moved_then) / (now - then)) if now > then else None,
        )
