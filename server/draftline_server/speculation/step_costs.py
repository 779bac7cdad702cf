"""What steps cost on this machine, measured: seconds of a target forward by number of tokens, and of one
draft forward by number of sequences. Seeded at warm-up, then followed with every real step."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(slots=True)
class _Point:
    seconds: float
    at_rest: float | None = None
    """As it was seeded; None for a size that only real steps have had."""
    num_measurements: int = 0
    """In real steps."""


class CostCurve:
    """Seconds as a function of a size, interpolated between the sizes that were measured.

    What was measured at rest gives the curve its shape. Its level follows the real steps, also where no
    step has been yet: a machine that was busy during the warm-up, or is busy now, is so at all sizes.
    """

    # Share of a new measurement in a point that has many; the first ones count for more, since what was
    # measured at rest may not hold under load. None is taken for more than `CLIP` times the old.
    WEIGHT = 0.1
    CLIP = 2.0
    # What nothing can take less than; a clock may show no difference at all.
    SHORTEST = 1e-6

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._points: list[_Point] = []
        self._level = 1.0

    @property
    def is_empty(self) -> bool:
        return not self._sizes

    def seed(self, size: int, seconds: float) -> None:
        """Sets a point as it was measured at rest."""
        seconds = max(seconds, self.SHORTEST)
        self._set(size, _Point(seconds, seconds))

    def smooth(self) -> None:
        """Takes out of the seeds what cannot be: that more costs less. The slower one was disturbed."""
        fastest = float("inf")
        for point in reversed(self._points):
            fastest = point.seconds = point.at_rest = min(point.seconds, fastest)

    def observe(self, size: int, seconds: float) -> None:
        """Takes in one measurement."""
        expected = self.estimate(size)
        if expected == 0.0:
            self._set(size, _Point(max(seconds, self.SHORTEST), num_measurements=1))
            return
        clipped = min(max(seconds, expected / self.CLIP, self.SHORTEST), self.CLIP * expected)
        point = self._find(size)
        if point is None:
            # A new point starts near the curve, so that one slow step does not bend it.
            self._set(size, _Point(clipped, num_measurements=1))
            return
        if point.at_rest is not None:
            self._level += self.WEIGHT * (clipped / point.at_rest - self._level)
        point.num_measurements += 1
        weight = max(self.WEIGHT, 1.0 / (point.num_measurements + 1))
        point.seconds = expected + weight * (clipped - expected)

    def estimate(self, size: int) -> float:
        """Seconds at `size`; beyond the ends the cost is taken as proportional, or constant below."""
        if self.is_empty:
            return 0.0
        index = bisect.bisect_left(self._sizes, size)
        if index == 0:
            return self._seconds(0)
        if index == len(self._sizes):
            return self._seconds(-1) * size / self._sizes[-1]
        low, high = self._sizes[index - 1], self._sizes[index]
        share = (size - low) / (high - low)
        return self._seconds(index - 1) * (1.0 - share) + self._seconds(index) * share

    def _seconds(self, index: int) -> float:
        point = self._points[index]
        return point.seconds if point.num_measurements else point.seconds * self._level

    def _find(self, size: int) -> _Point | None:
        index = bisect.bisect_left(self._sizes, size)
        return self._points[index] if index < len(self._sizes) and self._sizes[index] == size else None

    def _set(self, size: int, point: _Point) -> None:
        index = bisect.bisect_left(self._sizes, size)
        if index < len(self._sizes) and self._sizes[index] == size:
            self._points[index] = point
        else:
            self._sizes.insert(index, size)
            self._points.insert(index, point)


class StepCosts:
    """The cost curves of a server."""

    def __init__(self) -> None:
        self.verify = CostCurve()
        """Target forward and sampling, by tokens."""
        self.draft = CostCurve()
        """One forward of the draft model, by sequences."""
