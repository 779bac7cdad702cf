"""The seam through which the engine sees time, so that tests need no sleep."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow, from an arbitrary start."""

    def __call__(self) -> float: ...
