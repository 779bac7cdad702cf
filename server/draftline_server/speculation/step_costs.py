"""What steps cost on this machine, measured: seconds of a target forward by number of tokens, and of one
draft forward by number of sequences. Seeded at warm-up, then followed with every real step."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(slots=True)
class _Point:
    seconds: float
    num_measurements: int = 1


class CostCurve:
    """Seconds as a function of a size, interpolated between the sizes that were measured."""

    # Share of a new measurement in a point that has many; the first ones count for more, since what was
    # measured at rest may not hold under load. None is taken for more than `CLIP` times the old.
    WEIGHT = 0.1
    CLIP = 2.0
    # What nothing can take less than; a clock may show no difference at all.
    SHORTEST = 1e-6

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._points: list[_Point] = []

    @property
    def is_empty(self) -> bool:
        return not self._sizes

    def seed(self, size: int, seconds: float) -> None:
        """Sets a point as it was measured at rest."""
        index = bisect.bisect_left(self._sizes, size)
        if index < len(self._sizes) and self._sizes[index] == size:
            self._points[index] = _Point(max(seconds, self.SHORTEST))
        else:
            self._sizes.insert(index, size)
            self._points.insert(index, _Point(max(seconds, self.SHORTEST)))

    def observe(self, size: int, seconds: float) -> None:
        """Takes in one measurement."""
        index = bisect.bisect_left(self._sizes, size)
        if index < len(self._sizes) and self._sizes[index] == size:
            point = self._points[index]
            point.num_measurements += 1
            weight = max(self.WEIGHT, 1.0 / point.num_measurements)
            point.seconds += weight * (min(seconds, self.CLIP * point.seconds) - point.seconds)
            point.seconds = max(point.seconds, self.SHORTEST)
        elif self.is_empty:
            self.seed(size, seconds)
        else:
            # A new point starts near the curve, so that one slow step does not bend it.
            expected = self.estimate(size)
            self.seed(size, min(max(seconds, expected / self.CLIP), self.CLIP * expected))

    def estimate(self, size: int) -> float:
        """Seconds at `size`; beyond the ends the cost is taken as proportional, or constant below."""
        if self.is_empty:
            return 0.0
        index = bisect.bisect_left(self._sizes, size)
        if index == 0:
            return self._points[0].seconds
        if index == len(self._sizes):
            return self._points[-1].seconds * size / self._sizes[-1]
        low, high = self._sizes[index - 1], self._sizes[index]
        share = (size - low) / (high - low)
        return self._points[index - 1].seconds * (1.0 - share) + self._points[index].seconds * share


class StepCosts:
    """The cost curves of a server."""

    def __init__(self) -> None:
        self.verify = CostCurve()
        """Target forward and sampling, by tokens."""
        self.draft = CostCurve()
        """One forward of the draft model, by sequences."""
