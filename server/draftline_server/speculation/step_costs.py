"""What steps cost on this machine, measured: seconds of a target forward by number of tokens, and of one
draft forward by number of sequences. Seeded at warm-up, then followed with every real step."""

from __future__ import annotations

import bisect


class CostCurve:
    """Seconds as a function of a size, interpolated between the sizes that were measured."""

    # Share of a new measurement in its point; one is never taken for more than `CLIP` times the old.
    WEIGHT = 0.1
    CLIP = 2.0

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    @property
    def is_empty(self) -> bool:
        return not self._sizes

    def seed(self, size: int, seconds: float) -> None:
        """Sets a point as it was measured at rest."""
        index = bisect.bisect_left(self._sizes, size)
        if index < len(self._sizes) and self._sizes[index] == size:
            self._seconds[index] = seconds
        else:
            self._sizes.insert(index, size)
            self._seconds.insert(index, seconds)

    def observe(self, size: int, seconds: float) -> None:
        """Takes in one measurement."""
        index = bisect.bisect_left(self._sizes, size)
        if index < len(self._sizes) and self._sizes[index] == size:
            old = self._seconds[index]
            self._seconds[index] += self.WEIGHT * (min(seconds, self.CLIP * old) - old)
        elif self.is_empty:
            self._sizes.append(size)
            self._seconds.append(seconds)
        else:
            # A new point starts near the curve, so that one slow step does not bend it.
            expected = self.estimate(size)
            self._sizes.insert(index, size)
            self._seconds.insert(index, min(max(seconds, expected / self.CLIP), self.CLIP * expected))

    def estimate(self, size: int) -> float:
        """Seconds at `size`; beyond the ends the cost is taken as proportional, or constant below."""
        if self.is_empty:
            return 0.0
        index = bisect.bisect_left(self._sizes, size)
        if index == 0:
            return self._seconds[0]
        if index == len(self._sizes):
            return self._seconds[-1] * size / self._sizes[-1]
        low, high = self._sizes[index - 1], self._sizes[index]
        share = (size - low) / (high - low)
        return self._seconds[index - 1] + share * (self._seconds[index] - self._seconds[index - 1])


class StepCosts:
    """The cost curves of a server."""

    def __init__(self) -> None:
        self.verify = CostCurve()
        """Target forward and sampling, by tokens."""
        self.draft = CostCurve()
        """One forward of the draft model, by sequences."""
