"""Chooses how many tokens to draft for each request of a step, and when not to draft at all.

Goodput of a step is its expected output tokens over its expected seconds:

    (B + sum of survivals of the drafted positions) / (verify(B + drafted tokens) + depth * draft(B))

Positions are added in the order of their survival while that rises; the same is tried for every depth
of the draft model, since its forwards are shared by the batch. Everything comes from past
outcomes and measured times, never from the tokens at hand, so the choice cannot bias the output.

Off state: after some steps whose best goodput is not above plain decoding, speculation is off and steps
take exactly the plain path. Now and then a short probe drafts all the same: rarer each time it
disappoints, soon again after a success, so that a workload that turned predictable has speculation back
a few probes later. Whatever they show, probes take no more than `PROBE_SHARE` of the time.

On state: now and then a step is plain, so that the measured speed-up compares with what is so today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftline_server.speculation.acceptance import AcceptanceTracker
from draftline_server.speculation.chain import Offer
from draftline_server.speculation.step_costs import StepCosts

DRAFT_MODEL = "draft_model"

OFF_BELOW = 1.02
ON_ABOVE = 1.05
STEPS_BEFORE_OFF = 16
MIN_PROBE_INTERVAL = 32
MAX_PROBE_INTERVAL = 256
EAGER_PROBE_INTERVAL = 4
MAX_PROBED_REQUESTS = 2
PROBE_LENGTH = 2
PROBE_SHARE = 0.01
# Steps between plain ones while speculation is on: the first soon, then rarer.
MIN_PLAIN_INTERVAL = 8
MAX_PLAIN_INTERVAL = 128
# Drafts whose outcome is needed before speculation may be judged at all.
MIN_OBSERVED_DRAFTS = 8
# Weight of a step in the measured speed-up, and steps before it may switch speculation off.
SPEEDUP_WEIGHT = 0.05
MIN_MEASURED_STEPS = 48
MEASURED_OFF_BELOW = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """The user's wishes; see `SpeculativeDecodingConfig`."""

    num_speculative_tokens: int
    max_batch_size: int
    adaptive: bool = True
    fallback: bool = True
    min_acceptance_rate: float | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """Draft lengths by request id, and what they promise."""

    lengths: Mapping[str, int]
    speedup: float


class _Slot(NamedTuple):
    """A position that may be drafted. The most likely to be accepted sorts first."""

    rejection: float
    """Probability that it is not accepted."""
    position: int
    request_id: str
    num_forwards: int
    """Forwards of the draft model that reach it."""


class LengthController:
    """Pure decisions: lengths out, outcomes and durations in."""

    def __init__(self, settings: ControllerSettings, costs: StepCosts | None = None) -> None:
        self.costs = costs or StepCosts()
        self.acceptance = AcceptanceTracker()
        self.fallbacks: Counter[str] = Counter()
        self.is_active = settings.num_speculative_tokens > 0
        self.speedup = 1.0
        self._settings = settings
        self._num_poor_steps = 0
        self._num_observed_drafts = 0
        self._num_measured_steps = 0
        self._steps_until_probe = MIN_PROBE_INTERVAL
        self._probe_interval = MIN_PROBE_INTERVAL
        self._cheapest_interval = 0
        self._plain_interval = self._steps_until_plain = MIN_PLAIN_INTERVAL

    @property
    def limit(self) -> int:
        return self._settings.num_speculative_tokens

    def may_draft(self, batch_size: int) -> bool:
        """Whether this step should look for drafts at all. Counts down to the next probe while off."""
        if not self._may_speculate(batch_size):
            return False
        if self.is_active:
            return True
        self._steps_until_probe -= 1
        return self._steps_until_probe <= 0

    def may_follow(self, batch_size: int, *, has_offers: bool) -> bool:
        """Whether requests that the draft model has missed too much of should catch up.

        While off only where that is all that a due probe waits for.
        """
        is_probe_stuck = self._steps_until_probe <= 0 and not has_offers
        return self._may_speculate(batch_size) and (self.is_active or is_probe_stuck)

    def _may_speculate(self, batch_size: int) -> bool:
        return self.limit > 0 and batch_size <= self._settings.max_batch_size

    def choose(self, offers: Sequence[Offer], batch_size: int) -> Mapping[str, int]:
        """Draft lengths by request id for a step of `batch_size` sequences. Call after `may_draft`."""
        if not offers:
            return {}
        best = self._best_choice(offers, batch_size)
        if not self._settings.fallback:
            return best.lengths or _shortest(offers)
        reason = self._reason_against(best, offers)
        if self.is_active:
            return self._choose_while_active(best, reason, offers)
        return self._choose_while_off(best, reason, offers, batch_size)

    def observe_draft(
        self, request_id: str, proposer: str, *, num_draft_tokens: int, num_accepted_tokens: int
    ) -> None:
        """Takes in the outcome of one verified draft."""
        self._num_observed_drafts += 1
        self.acceptance.observe(
            request_id,
            proposer,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            is_probe=not self.is_active,
        )
        if not self.is_active and num_accepted_tokens > 0:
            self._probe_interval = EAGER_PROBE_INTERVAL
            self._await_probe()

    def observe_step(
        self,
        *,
        batch_size: int,
        draft_lengths: Sequence[tuple[str, int]],
        num_output_tokens: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Takes in what a step cost that only decoded; `draft_lengths` pairs proposers with tokens."""
        self.costs.verify.observe(batch_size + sum(length for _, length in draft_lengths), verify_seconds)
        model_lengths = [length for proposer, length in draft_lengths if proposer == DRAFT_MODEL]
        if model_lengths:
            self._observe_draft_cost(len(model_lengths), draft_seconds / max(model_lengths))
        if draft_lengths and self.is_active:
            plain_rate = batch_size / self.costs.verify.estimate(batch_size)
            rate = num_output_tokens / max(draft_seconds + verify_seconds, 1e-9)
            self._observe_speedup(rate / plain_rate)

    def _observe_draft_cost(self, num_sequences: int, seconds: float) -> None:
        # A probe reads first what the draft model has missed, so it can only show that drafting costs less.
        if self.is_active or seconds < self.costs.draft.estimate(num_sequences):
            self.costs.draft.observe(num_sequences, seconds)

    def _observe_speedup(self, speedup: float) -> None:
        self._num_measured_steps += 1
        weight = max(SPEEDUP_WEIGHT, 1.0 / self._num_measured_steps)
        self.speedup += weight * (speedup - self.speedup)

    def _choose_while_active(
        self, best: _Choice, reason: str | None, offers: Sequence[Offer]
    ) -> Mapping[str, int]:
        self._num_poor_steps = self._num_poor_steps + 1 if reason else 0
        if reason is None or self._num_poor_steps < STEPS_BEFORE_OFF:
            if self._is_plain_step_due():
                return {}
            # An estimate that fell by chance can only rise again where drafts go on.
            may_be_chance = self._num_observed_drafts >= MIN_OBSERVED_DRAFTS
            return best.lengths or (_shortest(offers) if may_be_chance else {})
        self.is_active = False
        self.fallbacks[reason] += 1
        self.speedup = 1.0
        self._num_measured_steps = 0
        self._probe_interval = self._steps_until_probe = MIN_PROBE_INTERVAL
        return {}

    def _is_plain_step_due(self) -> bool:
        self._steps_until_plain -= 1
        if self._steps_until_plain > 0:
            return False
        self._plain_interval = min(2 * self._plain_interval, MAX_PLAIN_INTERVAL)
        self._steps_until_plain = self._plain_interval
        return True

    def _choose_while_off(
        self, best: _Choice, reason: str | None, offers: Sequence[Offer], batch_size: int
    ) -> Mapping[str, int]:
        """A probe is due."""
        if reason is None and best.speedup >= ON_ABOVE:
            self.is_active = True
            self._num_poor_steps = 0
            self._plain_interval = self._steps_until_plain = MIN_PLAIN_INTERVAL
            return best.lengths
        self._probe_interval = min(2 * max(self._probe_interval, MIN_PROBE_INTERVAL // 2), MAX_PROBE_INTERVAL)
        probed = sorted(offers, key=_lag)[:MAX_PROBED_REQUESTS]
        lengths = {o.request.request_id: min(PROBE_LENGTH, o.max_length) for o in probed}
        self._cheapest_interval = int(self._loss(probed, lengths, batch_size) / PROBE_SHARE)
        self._await_probe()
        return lengths

    def _await_probe(self) -> None:
        self._steps_until_probe = max(self._probe_interval, self._cheapest_interval)

    def _reason_against(self, best: _Choice, offers: Sequence[Offer]) -> str | None:
        """Why speculation should be off, as the metric's label; None where it pays."""
        if best.lengths and self._num_observed_drafts < MIN_OBSERVED_DRAFTS:
            return None
        minimum = self._settings.min_acceptance_rate
        if minimum is not None and all(
            self.acceptance.first_acceptance(o.proposer) < minimum for o in offers
        ):
            return "acceptance"
        if best.speedup < OFF_BELOW:
            return "predicted_slower"
        if self._num_measured_steps >= MIN_MEASURED_STEPS and self.speedup < MEASURED_OFF_BELOW:
            return "measured_slower"
        return None

    def _best_choice(self, offers: Sequence[Offer], batch_size: int) -> _Choice:
        if self.costs.verify.is_empty or not self._settings.adaptive:
            lengths = {o.request.request_id: o.max_length for o in offers}
            return _Choice(lengths, self._speedup_of(offers, lengths, batch_size))
        slots = sorted(slot for offer in offers for slot in self._slots(offer))
        verify_seconds = [self.costs.verify.estimate(batch_size + n) for n in range(len(slots) + 1)]
        draft_seconds = self.costs.draft.estimate(batch_size)
        choices: list[_Choice] = []
        for depth in sorted({0} | {slot.num_forwards for slot in slots}):
            within = [slot for slot in slots if slot.num_forwards <= depth]
            choices.append(_allocate(within, batch_size, verify_seconds, depth * draft_seconds))
        return max(choices, key=lambda choice: choice.speedup)

    def _slots(self, offer: Offer) -> list[_Slot]:
        request_id, is_model = offer.request.request_id, offer.proposer == DRAFT_MODEL
        survivals = self.acceptance.survivals(request_id, offer.proposer, offer.max_length)
        return [
            _Slot(1.0 - survival, position, request_id, position + 1 if is_model else 0)
            for position, survival in enumerate(survivals)
        ]

    def _speedup_of(self, offers: Sequence[Offer], lengths: Mapping[str, int], batch_size: int) -> float:
        """What fixed lengths promise."""
        if self.costs.verify.is_empty:
            return ON_ABOVE
        depth = _depth(offers, lengths)
        seconds = self._verify_seconds(lengths, batch_size) + depth * self.costs.draft.estimate(batch_size)
        plain_seconds = self.costs.verify.estimate(batch_size)
        return self._expected_tokens(offers, lengths, batch_size) / batch_size * plain_seconds / seconds

    def _loss(self, offers: Sequence[Offer], lengths: Mapping[str, int], batch_size: int) -> float:
        """What a probe costs more than it yields, in plain steps."""
        if self.costs.verify.is_empty:
            return 0.0
        seconds = self._verify_seconds(lengths, batch_size)
        if depth := _depth(offers, lengths):
            num_missed_tokens = sum(_lag(o) for o in offers if o.proposer == DRAFT_MODEL)
            seconds += self.costs.draft.estimate(num_missed_tokens)
            seconds += (depth - 1) * self.costs.draft.estimate(len(offers))
        plain_seconds = self.costs.verify.estimate(batch_size)
        return seconds / plain_seconds - self._expected_tokens(offers, lengths, batch_size) / batch_size

    def _verify_seconds(self, lengths: Mapping[str, int], batch_size: int) -> float:
        return self.costs.verify.estimate(batch_size + sum(lengths.values()))

    def _expected_tokens(self, offers: Sequence[Offer], lengths: Mapping[str, int], batch_size: int) -> float:
        expected = float(batch_size)
        for offer in offers:
            request_id = offer.request.request_id
            expected += sum(self.acceptance.survivals(request_id, offer.proposer, lengths[request_id]))
        return expected


def _allocate(
    slots: Sequence[_Slot], batch_size: int, verify_seconds: Sequence[float], draft_seconds: float
) -> _Choice:
    """The best lengths among `slots`; `verify_seconds` is by number of draft tokens."""
    expected = float(batch_size)
    best_goodput, best_count = expected / (verify_seconds[0] + draft_seconds), 0
    for count, slot in enumerate(slots, start=1):
        expected += 1.0 - slot.rejection
        goodput = expected / (verify_seconds[count] + draft_seconds)
        if goodput > best_goodput:
            best_goodput, best_count = goodput, count
    lengths = Counter(slot.request_id for slot in slots[:best_count])
    return _Choice(lengths, best_goodput * verify_seconds[0] / batch_size)


def _shortest(offers: Sequence[Offer]) -> dict[str, int]:
    return {offer.request.request_id: 1 for offer in offers}


def _depth(offers: Sequence[Offer], lengths: Mapping[str, int]) -> int:
    """Forwards of the draft model that these lengths take."""
    model_lengths = (lengths[o.request.request_id] for o in offers if o.proposer == DRAFT_MODEL)
    return max(model_lengths, default=0)


def _lag(offer: Offer) -> int:
    """Committed tokens that the draft model has not read."""
    return offer.request.num_tokens - offer.request.draft_len
