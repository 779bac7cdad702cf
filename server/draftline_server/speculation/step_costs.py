"""What steps cost on this machine, measured: seconds of a target forward by number of tokens, and of one
draft forward by number of sequences. Seeded at warm-up, then followed with every real step."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """How much longer all takes than it once did: 1 at first. A shared machine changes it within seconds."""

    value: float = 1.0


@dataclass(slots=True)
class _Point:
    at_rest: float | None = None
    """As it was seeded; None for a size that only real steps have had."""
    seconds: float = 0.0
    """Of real steps, at a pace of 1."""
    num_measurements: int = 0
    """In real steps."""
    latest: int = 0
    """Number of the latest of them, among those of all sizes."""


class CostCurve:
    """Seconds as a function of a size, interpolated between the sizes that were measured.

    What a size costs is learned slowly, and the pace of the machine, which all sizes share, with every step.
    So a size that no step has had for long costs what it would cost now: plain steps, which those with
    drafts are compared with, are rare while drafts pay, and the machine is not what it was at the last one.

    A size that no step has had yet costs what was measured at rest, times what real steps took so far of
    what was measured for theirs.

    Measurements count by their logarithm: else each would leave pace and sizes a little further apart, and
    in millions of steps they would end at nothing and at infinity.
    """

    # Share of a new measurement in the pace, and in a point that has many. A point's first ones count for
    # more, since what was measured at rest may not hold under load; and those after a long time, by the
    # steps since, since what changed for other sizes alone was taken for the pace. None is taken for more
    # than `CLIP` times the old.
    PACE_WEIGHT = 0.2
    WEIGHT = 0.03
    LATE_WEIGHT = 0.1
    LEVEL_WEIGHT = 0.1
    CLIP = 2.0
    # What nothing can take less than; a clock may show no difference at all.
    SHORTEST = 1e-6

    def __init__(self, pace: Pace | None = None, *, sets_pace: bool = True) -> None:
        self._sizes: list[int] = []
        self._points: list[_Point] = []
        self._pace = pace or Pace()
        self._sets_pace = sets_pace
        self._level = 1.0
        self._num_measurements = 0

    @property
    def is_empty(self) -> bool:
        return not self._sizes

    def seed(self, size: int, seconds: float) -> None:
        """Sets a point as it was measured at rest."""
        self._set(size, _Point(at_rest=max(seconds, self.SHORTEST)))

    def smooth(self) -> None:
        """Takes out of the seeds what cannot be: that more costs less. The slower one was disturbed."""
        fastest = float("inf")
        for point in reversed(self._points):
            if point.at_rest is not None:
                fastest = point.at_rest = min(point.at_rest, fastest)

    def observe(self, size: int, seconds: float) -> None:
        """Takes in one measurement."""
        seconds = max(seconds, self.SHORTEST)
        if self.is_empty:
            self._set(size, _Point(seconds=seconds / self._pace.value, num_measurements=1))
            return
        expected = self.estimate(size)
        ratio = min(max(seconds / expected, 1.0 / self.CLIP), self.CLIP)
        # A size's first step starts on the curve, so that a slow one does not bend it.
        point = self._find(size) or self._set(size, _Point())
        if point.num_measurements == 0:
            point.seconds = expected / self._pace.value
        if self._sets_pace:
            self._pace.value *= ratio**self.PACE_WEIGHT
        point.seconds *= ratio ** self._weight_of_next(point)
        if point.at_rest is not None:
            self._level += self.LEVEL_WEIGHT * (point.seconds / point.at_rest - self._level)

    def _weight_of_next(self, point: _Point) -> float:
        """Of a measurement that it is about to get."""
        self._num_measurements += 1
        point.num_measurements += 1
        num_steps, point.latest = self._num_measurements - point.latest, self._num_measurements
        return max(min(self.WEIGHT * num_steps, self.LATE_WEIGHT), 1.0 / (point.num_measurements + 1))

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
        if point.num_measurements == 0 and point.at_rest is not None:
            return point.at_rest * self._level * self._pace.value
        return point.seconds * self._pace.value

    def _find(self, size: int) -> _Point | None:
        index = bisect.bisect_left(self._sizes, size)
        return self._points[index] if index < len(self._sizes) and self._sizes[index] == size else None

    def _set(self, size: int, point: _Point) -> _Point:
        index = bisect.bisect_left(self._sizes, size)
        if index < len(self._sizes) and self._sizes[index] == size:
            self._points[index] = point
        else:
            self._sizes.insert(index, size)
            self._points.insert(index, point)
        return point


class StepCosts:
    """The cost curves of a server."""

    def __init__(self) -> None:
        pace = Pace()
        self.verify = CostCurve(pace)
        """Target forward and sampling, by tokens."""
        self.draft = CostCurve(pace, sets_pace=False)
        """One forward of the draft model, by sequences."""
