"""Whether one proposer is asked for drafts, and when it is probed while it is not."""

from __future__ import annotations

STEPS_BEFORE_OFF = 16
MIN_PROBE_INTERVAL = 32
MAX_PROBE_INTERVAL = 256
EAGER_PROBE_INTERVAL = 4
# Probes in a row that may follow one that was right, before any of them has been earned back.
MAX_EAGER_PROBES = 8
# What each of them may cost more than it yields, in plain steps.
MAX_EAGER_LOSS = 1.0
MAX_RELAPSES = 5
# Steps after which being on was worth its beginning, when drafts read what they missed.
LONG_STAY = 256
# What was found out with one number of sequences says little of one so many times as large or as small.
OTHER_BATCH = 4


class MeasuredSpeedup:
    """The speed of steps with drafts over plain ones: a mean of all at first, then of the latest."""

    # Weight of a step.
    WEIGHT = 0.05

    def __init__(self) -> None:
        self.value = 1.0
        self.num_steps = 0

    def observe(self, speedup: float) -> None:
        self.num_steps += 1
        weight = max(self.WEIGHT, 1.0 / self.num_steps)
        self.value += weight * (speedup - self.value)


class ProposerSwitch:
    """Off after enough poor steps in a row; while off, counts the steps between probes."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.num_observed_drafts = 0
        self.speedup = MeasuredSpeedup()
        """Of the steps with its drafts."""
        self._num_poor_steps = 0
        # Nothing is known against the first time it is on.
        self._num_steps_on = LONG_STAY
        self._num_relapses = 0
        self._steps_until_probe = MIN_PROBE_INTERVAL
        self._probe_interval = MIN_PROBE_INTERVAL
        self._cheapest_interval = 0
        self._steps_until_earned = 0
        """In which all probes so far have been earned back."""
        self._num_eager_left = 0
        self._is_next_eager = False
        self._batch_size = 1
        """At which it was switched off, or last given another chance."""

    @property
    def is_probe_due(self) -> bool:
        return self._steps_until_probe <= 0

    def note(self, *, is_poor: bool) -> bool:
        """Counts a step in which it was on; returns whether there were too many poor ones in a row."""
        self._num_steps_on += 1
        self._steps_until_earned = max(0, self._steps_until_earned - 1)
        self._num_poor_steps = self._num_poor_steps + 1 if is_poor else 0
        return self._num_poor_steps >= STEPS_BEFORE_OFF

    def turn_off(self, *, batch_size: int, was_promising: bool = False) -> None:
        """Switches off.

        What looked well but measured badly, or was on for a short time only, will do so again: it waits
        longer each time.
        """
        is_relapse = was_promising or self._num_steps_on < LONG_STAY
        self._num_relapses = self._num_relapses + 1 if is_relapse else 0
        self.is_on = False
        self._batch_size = batch_size
        self.speedup = MeasuredSpeedup()
        self._probe_interval = MIN_PROBE_INTERVAL
        self._steps_until_probe = MIN_PROBE_INTERVAL * 2 ** min(self._num_relapses, MAX_RELAPSES)

    def turn_on(self) -> None:
        self.is_on = True
        self._num_poor_steps = 0
        self._num_steps_on = 0

    def count_down(self, batch_size: int) -> bool:
        """Counts a step in which it was off; returns whether a probe is due.

        However long it was to wait: with another number of sequences it has another chance.
        """
        if not self._batch_size / OTHER_BATCH < batch_size < self._batch_size * OTHER_BATCH:
            self._batch_size = batch_size
            soon = max(MIN_PROBE_INTERVAL, self._cheapest_interval)
            self._steps_until_probe = min(self._steps_until_probe, soon)
        self._steps_until_probe -= 1
        self._steps_until_earned = max(0, self._steps_until_earned - 1)
        return self.is_probe_due

    def await_next_probe(self, *, cheapest_interval: int) -> None:
        """After a probe: the next one later than this one was, and not before it has been earned back."""
        if not self._is_next_eager:
            self._num_eager_left = MAX_EAGER_PROBES
        self._is_next_eager = False
        self._probe_interval = min(2 * max(self._probe_interval, MIN_PROBE_INTERVAL // 2), MAX_PROBE_INTERVAL)
        self._cheapest_interval = cheapest_interval
        self._steps_until_earned += cheapest_interval
        self._steps_until_probe = max(self._probe_interval, self._steps_until_earned)

    def probe_soon(self, *, loss: float) -> None:
        """After a probe that was right; `loss` is what another would cost, now that the draft is current."""
        self._probe_interval = EAGER_PROBE_INTERVAL
        self._is_next_eager = self._num_eager_left > 0 and loss <= MAX_EAGER_LOSS
        if self._is_next_eager:
            self._num_eager_left -= 1
            self._steps_until_probe = EAGER_PROBE_INTERVAL
        else:
            self._steps_until_probe = max(EAGER_PROBE_INTERVAL, self._steps_until_earned)
