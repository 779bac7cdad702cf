"""One process at a time fetches into a directory; the others wait and find the model there."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from draftline_server.log import log_event

LOCK_NAME = ".draftline-fetch.lock"

_POLL_SECONDS = 0.2
_LOG_SECONDS = 10.0

_logger = logging.getLogger(__name__)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock, which the kernel takes from a process that dies.

    On a file system without locks it goes on without one: downloads bear that, at the price of doing the
    work twice.
    """
    with (directory / LOCK_NAME).open("a") as file:
        waited_seconds = 0.0
        while not _try_lock(file):
            if waited_seconds % _LOG_SECONDS < _POLL_SECONDS:
                log_event(
                    _logger, logging.INFO, "another fetch holds the directory", directory=str(directory)
                )
            time.sleep(_POLL_SECONDS)
            waited_seconds += _POLL_SECONDS
        yield


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log_event(_logger, logging.WARNING, "the directory cannot be locked", reason=error.strerror)
    return True
