"""Chooses how many tokens to draft for each request of a step, from which proposer, and when not at all.

Goodput of a step is its expected output tokens over its expected seconds:

    (B + sum of survivals of the drafted positions) / (verify(B + drafted tokens) + depth * draft(B))

Positions are added in the order of their survival while that rises; the same is tried for every depth
of the draft model, since its forwards are shared by the batch. Of several proposers with an offer for a
request the one is taken that promises the most; now and then the first of the request's methods all the
same, since what is never drafted is never learned about. Everything comes from past
outcomes and measured times, and from what was committed, never from the tokens that would be drafted, so
the choice cannot bias the output.

Every proposer has a switch of its own: n-grams may pay where the draft model does not, and the other way
round. Off: after some steps in which a proposer did not pay it is no longer asked; with all of them off,
steps take exactly the plain path. Now and then a short probe asks it all the same: rarer each time it
disappoints, soon again after a success, so that a workload that turned predictable has it back a few
probes later. Whatever they show, probes take no more than `PROBE_SHARE` of the time.

On: now and then a step is plain, so that the measured speed-up compares with what is so today; the less
drafts are worth, the more often, since that costs less and the answer matters more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from draftline_server.speculation.acceptance import AcceptanceTracker
from draftline_server.speculation.chain import Offer
from draftline_server.speculation.proposer_switch import MeasuredSpeedup, ProposerSwitch
from draftline_server.speculation.step_costs import StepCosts

DRAFT_MODEL = "draft_model"
MEASURED_SLOWER = "measured_slower"

OFF_BELOW = 1.02
ON_ABOVE = 1.05
MAX_PROBED_REQUESTS = 2
PROBE_LENGTH = 2
PROBE_SHARE = 0.005
# Steps in which the draft model must earn what it first has to read.
EARN_BACK_STEPS = 64
# Steps between plain ones while speculation is on: the first soon, then rarer, so that they cost no more
# than `PLAIN_SHARE` of the speed without drafts, or a fourth of a gain that is hardly one.
MIN_PLAIN_INTERVAL = 4
MAX_PLAIN_INTERVAL = 128
PLAIN_SHARE = 0.01
# Times that a request's first method is passed over before it has another chance.
PASSED_OVER = 32
# Drafts whose outcome is needed before a proposer may be judged at all.
MIN_OBSERVED_DRAFTS = 8
# Steps before the measured speed-up may switch a proposer off.
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


class Choice(NamedTuple):
    """What one request is drafted in a step."""

    proposer: str
    length: int


@dataclass(frozen=True, slots=True)
class _Best:
    """The lengths of highest goodput, by request id, and what they promise."""

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
    """Pure decisions: choices out, outcomes and durations in."""

    def __init__(
        self,
        settings: ControllerSettings,
        costs: StepCosts | None = None,
        *,
        proposers: Sequence[str] = ("ngram", DRAFT_MODEL),
    ) -> None:
        self.costs = costs or StepCosts()
        self._settings = settings
        self._proposers = tuple(proposers)
        self.reset()

    def reset(self) -> None:
        """Forgets all that drafts have shown; what steps cost stays."""
        self.acceptance = AcceptanceTracker()
        self.fallbacks: Counter[str] = Counter()
        self._speedup = MeasuredSpeedup()
        self._switches = {name: ProposerSwitch(is_on=self.limit > 0) for name in self._proposers}
        self._kinds: dict[str, str] = {}
        self._passed_over: Counter[tuple[str, str]] = Counter()
        self._retried: set[str] = set()
        self._unpaid_seconds = 0.0
        self._probed: dict[str, tuple[Sequence[Offer], Mapping[str, int], int]] = {}
        self._plain_interval = self._steps_until_plain = MIN_PLAIN_INTERVAL

    @property
    def limit(self) -> int:
        return self._settings.num_speculative_tokens

    @property
    def is_active(self) -> bool:
        """Whether any proposer is on."""
        return any(switch.is_on for switch in self._switches.values())

    @property
    def speedup(self) -> float:
        """Measured, of steps with drafts over plain ones; 1 while every proposer is off."""
        return self._speedup.value

    def is_on(self, proposer: str) -> bool:
        return self._switches[proposer].is_on

    def switch_off(self) -> None:
        """Switches every proposer off, as if it had disappointed; for tests."""
        for switch in self._switches.values():
            switch.turn_off(batch_size=1)

    def usable(self, batch_size: int) -> frozenset[str]:
        """The proposers that this step should ask. Counts down to the next probes of those that are off."""
        if not self._may_speculate(batch_size):
            return frozenset()
        return frozenset(
            name for name, switch in self._switches.items() if switch.is_on or switch.count_down(batch_size)
        )

    def may_follow(self, batch_size: int, *, has_offers: bool) -> bool:
        """Whether requests that the draft model has missed too much of should catch up.

        While it is off only where that is all that a due probe waits for; `has_offers` is whether it had any.
        """
        switch = self._switches.get(DRAFT_MODEL)
        if switch is None or not self._may_speculate(batch_size):
            return False
        return switch.is_on or (switch.is_probe_due and not has_offers)

    def _may_speculate(self, batch_size: int) -> bool:
        return self.limit > 0 and batch_size <= self._settings.max_batch_size

    def choose(self, offers: Sequence[Offer], batch_size: int) -> Mapping[str, Choice]:
        """What to draft, by request id, in a step of `batch_size` sequences.

        `offers` are those of the proposers that `usable` named, of each request in the order of its methods.
        """
        on = [offer for offer in offers if self.is_on(offer.proposer)]
        chosen = self._choose_of_those_on(self._best_of_each_request(on, batch_size), batch_size)
        probed: set[str] = set()
        for name, switch in self._switches.items():
            free = [o for o in offers if o.proposer == name and o.request.request_id not in probed]
            if free and not switch.is_on and switch.is_probe_due:
                probes = self._probe(name, free, batch_size)
                probed.update(probes)
                chosen |= probes
        self._kinds |= {
            o.request.request_id: o.kind
            for o in offers
            if o.request.request_id in chosen and chosen[o.request.request_id].proposer == o.proposer
        }
        return chosen

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.acceptance.forget(request_id)
        self._kinds.pop(request_id, None)
        for name in self._proposers:
            self._passed_over.pop((request_id, name), None)
        self._retried.discard(request_id)

    def observe_draft(
        self, request_id: str, proposer: str, *, num_draft_tokens: int, num_accepted_tokens: int
    ) -> None:
        """Takes in the outcome of one verified draft."""
        switch = self._switches[proposer]
        switch.num_observed_drafts += 1
        self.acceptance.observe(
            request_id,
            proposer,
            self._kinds.get(request_id, proposer),
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            is_probe=not switch.is_on,
        )
        if not switch.is_on and num_accepted_tokens > 0 and proposer in self._probed:
            switch.probe_soon(loss=self._loss(*self._probed[proposer]))
        if request_id in self._retried:
            self._retried.remove(request_id)
            if num_accepted_tokens == num_draft_tokens > 0:
                self._passed_over[request_id, proposer] = PASSED_OVER  # and once more

    def observe_follow(self, seconds: float) -> None:
        """Takes in what the draft model cost outside of drafting; the drafts to come must earn it."""
        self._unpaid_seconds += seconds

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
        proposers = {name for name, _ in draft_lengths if self.is_on(name)}
        if not proposers:
            return
        if DRAFT_MODEL in proposers:
            draft_seconds += self._unpaid_seconds
            self._unpaid_seconds = 0.0
        plain_rate = batch_size / self.costs.verify.estimate(batch_size)
        rate = num_output_tokens / max(draft_seconds + verify_seconds, 1e-9)
        for speedup in (self._speedup, *(self._switches[name].speedup for name in proposers)):
            speedup.observe(rate / plain_rate)

    def _observe_draft_cost(self, num_sequences: int, seconds: float) -> None:
        # A probe reads first what the draft model has missed, so it can only show that drafting costs less.
        if self.is_on(DRAFT_MODEL) or seconds < self.costs.draft.estimate(num_sequences):
            self.costs.draft.observe(num_sequences, seconds)

    def _best_of_each_request(self, offers: Sequence[Offer], batch_size: int) -> list[Offer]:
        by_request: defaultdict[str, list[Offer]] = defaultdict(list)
        for offer in offers:
            by_request[offer.request.request_id].append(offer)
        if not self._settings.adaptive or self.costs.verify.is_empty or len(by_request) == len(offers):
            return [own[0] for own in by_request.values()]
        seconds = {name: self._seconds_by_length(name, batch_size) for name in self._proposers}
        return [self._best_of(own, seconds) for own in by_request.values()]

    def _seconds_by_length(self, proposer: str, batch_size: int) -> list[float]:
        """Of steps in which every sequence has a draft of that length."""
        draft_seconds = self.costs.draft.estimate(batch_size) if proposer == DRAFT_MODEL else 0.0
        return [
            self.costs.verify.estimate(batch_size * (1 + length)) + length * draft_seconds
            for length in range(self.limit + 1)
        ]

    def _best_of(self, offers: Sequence[Offer], seconds: Mapping[str, Sequence[float]]) -> Offer:
        """Of one request's the one of highest goodput, most of the time."""
        first, best = offers[0], max(offers, key=lambda offer: self._goodput(offer, seconds[offer.proposer]))
        if best is first or self._was_passed_over(first):
            return first
        self._passed_over[first.request.request_id, first.proposer] += 1
        return best

    def _was_passed_over(self, offer: Offer) -> bool:
        """For so long that it has another chance, whatever is expected of it."""
        return self._passed_over[offer.request.request_id, offer.proposer] >= PASSED_OVER

    def _goodput(self, offer: Offer, seconds: Sequence[float]) -> float:
        """Of a sequence with this offer, at its best length."""
        survivals = self.acceptance.survivals(offer.request.request_id, offer.kind, offer.max_length)
        expected = accumulate(survivals, initial=1.0)
        return max(tokens / spent for tokens, spent in zip(expected, seconds, strict=False))

    def _choose_of_those_on(self, offers: Sequence[Offer], batch_size: int) -> dict[str, Choice]:
        if not offers:
            return {}
        best = self._best_choice(offers, batch_size)
        if not self._settings.fallback:
            return _choices(offers, best.lengths or _shortest(offers))
        lengths = dict(best.lengths)
        for name in dict.fromkeys(offer.proposer for offer in offers):
            own = [offer for offer in offers if offer.proposer == name]
            reason = self._reason_against(name, own, best)
            if self._switches[name].note(is_poor=reason is not None) and reason is not None:
                self._switch_off(name, reason, batch_size)
                for offer in own:
                    lengths.pop(offer.request.request_id, None)
        if not lengths:
            # An estimate that fell by chance can only rise again where drafts go on.
            lengths = _shortest(o for o in offers if self.is_on(o.proposer) and self._has_drafted(o.proposer))
        if lengths and self._is_plain_step_due():
            return {}
        for offer in filter(self._was_passed_over, offers):
            request_id = offer.request.request_id
            if self.is_on(offer.proposer):
                lengths[request_id] = max(lengths.get(request_id, 0), min(PROBE_LENGTH, offer.max_length))
                self._retried.add(request_id)
            self._passed_over[request_id, offer.proposer] = 0
        return _choices(offers, lengths)

    def _switch_off(self, name: str, reason: str, batch_size: int) -> None:
        self._switches[name].turn_off(batch_size=batch_size, was_promising=reason == MEASURED_SLOWER)
        self.fallbacks[reason] += 1
        if not self.is_active:
            self._speedup = MeasuredSpeedup()

    def _has_drafted(self, name: str) -> bool:
        return self._switches[name].num_observed_drafts > 0

    def _is_judged(self, name: str) -> bool:
        return self._switches[name].num_observed_drafts >= MIN_OBSERVED_DRAFTS

    def _is_plain_step_due(self) -> bool:
        self._steps_until_plain -= 1
        if self._steps_until_plain > 0:
            return False
        affordable = max(MIN_PLAIN_INTERVAL, int((self.speedup - 1.0) / PLAIN_SHARE))
        self._plain_interval = min(2 * self._plain_interval, affordable, MAX_PLAIN_INTERVAL)
        self._steps_until_plain = self._plain_interval
        return True

    def _probe(self, name: str, offers: Sequence[Offer], batch_size: int) -> dict[str, Choice]:
        """Switches a proposer on that would pay by what its probes have shown, else probes it."""
        switch, best = self._switches[name], self._best_choice(offers, batch_size)
        on_above = self._on_above(name, offers, batch_size)
        if self._reason_against(name, offers, best) is None and best.speedup >= on_above:
            switch.turn_on()
            self._plain_interval = self._steps_until_plain = MIN_PLAIN_INTERVAL
            return _choices(offers, best.lengths)
        probed = sorted(offers, key=_lag)[:MAX_PROBED_REQUESTS]
        lengths = {o.request.request_id: min(PROBE_LENGTH, o.max_length) for o in probed}
        share = PROBE_SHARE / len(self._switches)
        switch.await_next_probe(cheapest_interval=int(self._loss(probed, lengths, batch_size) / share))
        self._probed[name] = probed, lengths, batch_size
        return _choices(probed, lengths)

    def _on_above(self, name: str, offers: Sequence[Offer], batch_size: int) -> float:
        """The speed-up that is worth switching on for."""
        if name != DRAFT_MODEL or self.costs.verify.is_empty:
            return ON_ABOVE
        missed_seconds = self.costs.draft.estimate(sum(_lag(offer) for offer in offers))
        missed_steps = missed_seconds / self.costs.verify.estimate(batch_size)
        return max(ON_ABOVE, 1.0 + missed_steps / EARN_BACK_STEPS)

    def _reason_against(self, name: str, offers: Sequence[Offer], best: _Best) -> str | None:
        """Why a proposer should be off, as the metric's label; None where it pays."""
        switch, gets_any = self._switches[name], _any_length(offers, best.lengths)
        if gets_any and not self._is_judged(name):
            return None
        minimum = self._settings.min_acceptance_rate
        if minimum is not None and self.acceptance.first_acceptance(name) < minimum:
            return "acceptance"
        if best.speedup < OFF_BELOW or not gets_any:
            return "predicted_slower"
        if switch.speedup.num_steps >= MIN_MEASURED_STEPS and switch.speedup.value < MEASURED_OFF_BELOW:
            return MEASURED_SLOWER
        return None

    def _best_choice(self, offers: Sequence[Offer], batch_size: int) -> _Best:
        if self.costs.verify.is_empty or not self._settings.adaptive:
            lengths = {o.request.request_id: o.max_length for o in offers}
            return _Best(lengths, self._speedup_of(offers, lengths, batch_size))
        slots = sorted(slot for offer in offers for slot in self._slots(offer))
        verify_seconds = [self.costs.verify.estimate(batch_size + n) for n in range(len(slots) + 1)]
        draft_seconds = self.costs.draft.estimate(batch_size)
        choices: list[_Best] = []
        for depth in sorted({0} | {slot.num_forwards for slot in slots}):
            within = [slot for slot in slots if slot.num_forwards <= depth]
            choices.append(_allocate(within, batch_size, verify_seconds, depth * draft_seconds))
        return max(choices, key=lambda choice: choice.speedup)

    def _slots(self, offer: Offer) -> list[_Slot]:
        request_id, is_model = offer.request.request_id, offer.proposer == DRAFT_MODEL
        survivals = self.acceptance.survivals(request_id, offer.kind, offer.max_length)
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
            expected += sum(self.acceptance.survivals(request_id, offer.kind, lengths[request_id]))
        return expected


def _allocate(
    slots: Sequence[_Slot], batch_size: int, verify_seconds: Sequence[float], draft_seconds: float
) -> _Best:
    """The best lengths among `slots`; `verify_seconds` is by number of draft tokens."""
    expected = float(batch_size)
    best_goodput, best_count = expected / (verify_seconds[0] + draft_seconds), 0
    for count, slot in enumerate(slots, start=1):
        expected += 1.0 - slot.rejection
        goodput = expected / (verify_seconds[count] + draft_seconds)
        if goodput > best_goodput:
            best_goodput, best_count = goodput, count
    lengths = Counter(slot.request_id for slot in slots[:best_count])
    return _Best(lengths, best_goodput * verify_seconds[0] / batch_size)


def _choices(offers: Iterable[Offer], lengths: Mapping[str, int]) -> dict[str, Choice]:
    return {
        o.request.request_id: Choice(o.proposer, length)
        for o in offers
        if (length := lengths.get(o.request.request_id, 0)) > 0
    }


def _any_length(offers: Iterable[Offer], lengths: Mapping[str, int]) -> bool:
    return any(lengths.get(offer.request.request_id, 0) > 0 for offer in offers)


def _shortest(offers: Iterable[Offer]) -> dict[str, int]:
    return {offer.request.request_id: 1 for offer in offers}


def _depth(offers: Sequence[Offer], lengths: Mapping[str, int]) -> int:
    """Forwards of the draft model that these lengths take."""
    model_lengths = (lengths[o.request.request_id] for o in offers if o.proposer == DRAFT_MODEL)
    return max(model_lengths, default=0)


def _lag(offer: Offer) -> int:
    """Committed tokens that the draft model has not read."""
    return offer.request.num_tokens - offer.request.draft_len
