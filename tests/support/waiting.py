"""Waiting for what another process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], seconds: float = 30, interval: float = 0.1) -> float:
    """Returns how long it took; an `AssertionError` where it took too long."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds, f"does not hold after {seconds} s"
        time.sleep(interval)
    return time.monotonic() - start
