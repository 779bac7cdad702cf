"""Chooses how many tokens to draft for each request of a step, and when not to draft at all.

Goodput of a step is its expected output tokens over its expected seconds:

    (B + sum of survivals of the drafted positions) / (verify(B + drafted tokens) + depth * draft(B))

Positions are added in the order of their survival while that rises; the same is tried for every depth
of the draft model, since its forwards are shared by the batch. Everything comes from past
outcomes and measured times, never from the tokens at hand, so the choice cannot bias the output.

Off state: after some steps whose best goodput is not above plain decoding, speculation is off and steps
take exactly the plain path. Now and then a short probe drafts all the same: rarer each time it
disappoints, so that it costs next to nothing, but at least every `MAX_PROBE_INTERVAL` steps; soon again
after a success, so that a workload that turned predictable has speculation back a few probes later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftline_server.speculation.acceptance import AcceptanceTracker
from draftline_server.speculation.chain import Offer
from draftline_server.speculation.step_costs import StepCosts

DRAFT_MODEL = "draft_model"

OFF_BELOW = 1.02
ON_ABOVE = 1.05
STEPS_BEFORE_OFF = 8
MIN_PROBE_INTERVAL = 32
MAX_PROBE_INTERVAL = 256
EAGER_PROBE_INTERVAL = 4
MAX_PROBED_REQUESTS = 2
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

    @property
    def limit(self) -> int:
        return self._settings.num_speculative_tokens

    def may_draft(self, batch_size: int) -> bool:
        """Whether this step should look for drafts at all. Counts down to the next probe while off."""
        if self.limit == 0 or batch_size > self._settings.max_batch_size:
            return False
        if self.is_active:
            return True
        self._steps_until_probe -= 1
        return self._steps_until_probe <= 0

    def choose(self, offers: Sequence[Offer], batch_size: int) -> Mapping[str, int]:
        """Draft lengths by request id for a step of `batch_size` sequences. Call after `may_draft`."""
        if not offers:
            return {}
        best = self._best_choice(offers, batch_size)
        if not self._settings.fallback:
            return best.lengths or {o.request.request_id: 1 for o in offers}
        reason = self._reason_against(best, offers)
        if self.is_active:
            return self._choose_while_active(best, reason)
        return self._choose_while_off(best, reason, offers)

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
            self._probe_interval = self._steps_until_probe = EAGER_PROBE_INTERVAL

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
            self.costs.draft.observe(len(model_lengths), draft_seconds / max(model_lengths))
        if draft_lengths:
            plain_rate = batch_size / self.costs.verify.estimate(batch_size)
            rate = num_output_tokens / max(draft_seconds + verify_seconds, 1e-9)
            self._observe_speedup(rate / plain_rate)

    def _observe_speedup(self, speedup: float) -> None:
        self._num_measured_steps += 1
        weight = max(SPEEDUP_WEIGHT, 1.0 / self._num_measured_steps)
        self.speedup += weight * (speedup - self.speedup)

    def _choose_while_active(self, best: _Choice, reason: str | None) -> Mapping[str, int]:
        self._num_poor_steps = self._num_poor_steps + 1 if reason else 0
        if reason is None or self._num_poor_steps < STEPS_BEFORE_OFF:
            return best.lengths
        self.is_active = False
        self.fallbacks[reason] += 1
        self.speedup = 1.0
        self._probe_interval = self._steps_until_probe = MIN_PROBE_INTERVAL
        return {}

    def _choose_while_off(
        self, best: _Choice, reason: str | None, offers: Sequence[Offer]
    ) -> Mapping[str, int]:
        """A probe is due."""
        if reason is None and best.speedup >= ON_ABOVE:
            self.is_active = True
            self._num_poor_steps = 0
            self._num_measured_steps = 0
            return best.lengths
        self._probe_interval = min(2 * max(self._probe_interval, MIN_PROBE_INTERVAL // 2), MAX_PROBE_INTERVAL)
        self._steps_until_probe = self._probe_interval
        probed = sorted(offers, key=lambda o: o.request.num_tokens - o.request.draft_len)
        return {o.request.request_id: min(2, o.max_length) for o in probed[:MAX_PROBED_REQUESTS]}

    def _reason_against(self, best: _Choice, offers: Sequence[Offer]) -> str | None:
        """Why speculation should be off, as the metric's label; None where it pays."""
        if self._num_observed_drafts < MIN_OBSERVED_DRAFTS:
            return None
        minimum = self._settings.min_acceptance_rate
        if minimum is not None and all(
            self.acceptance.global_acceptance(o.proposer, 0) < minimum for o in offers
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
        depths = {min(o.max_length, self.limit) for o in offers if o.proposer == DRAFT_MODEL}
        choices = [self._allocate(offers, depth, batch_size) for depth in range(max(depths, default=0) + 1)]
        return max(choices, key=lambda choice: choice.speedup)

    def _allocate(self, offers: Sequence[Offer], depth: int, batch_size: int) -> _Choice:
        """The best lengths where the draft model runs `depth` times."""
        slots = sorted(
            (-survival, position, offer.request.request_id)
            for offer in offers
            for position, survival in enumerate(self._survivals(offer, depth))
        )
        costs = self.costs
        overhead = depth * costs.draft.estimate(batch_size)
        expected = float(batch_size)
        best_goodput, best_count = expected / (costs.verify.estimate(batch_size) + overhead), 0
        for count, (negative_survival, _, _) in enumerate(slots, start=1):
            expected -= negative_survival
            goodput = expected / (costs.verify.estimate(batch_size + count) + overhead)
            if goodput > best_goodput:
                best_goodput, best_count = goodput, count
        lengths = Counter(request_id for _, _, request_id in slots[:best_count])
        plain = batch_size / costs.verify.estimate(batch_size)
        return _Choice(lengths, best_goodput / plain)

    def _survivals(self, offer: Offer, depth: int) -> list[float]:
        length = min(offer.max_length, depth) if offer.proposer == DRAFT_MODEL else offer.max_length
        return self.acceptance.survivals(offer.request.request_id, offer.proposer, length)

    def _speedup_of(self, offers: Sequence[Offer], lengths: Mapping[str, int], batch_size: int) -> float:
        """What fixed lengths promise."""
        if self.costs.verify.is_empty:
            return ON_ABOVE
        expected, depth = float(batch_size), 0
        for offer in offers:
            length = lengths[offer.request.request_id]
            expected += sum(self.acceptance.survivals(offer.request.request_id, offer.proposer, length))
            depth = max(depth, length if offer.proposer == DRAFT_MODEL else 0)
        num_tokens = batch_size + sum(lengths.values())
        seconds = self.costs.verify.estimate(num_tokens) + depth * self.costs.draft.estimate(batch_size)
        plain = batch_size / self.costs.verify.estimate(batch_size)
        return expected / seconds / plain
