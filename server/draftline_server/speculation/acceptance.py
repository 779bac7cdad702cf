"""How likely the next draft tokens are to be accepted, from what happened to earlier ones.

Estimates are conditional: of position j given that all before it were accepted. A draft that fails at
position 1 says nothing about position 2 (using accepted / drafted would favour short drafts). What was seen
of a position fades with every draft, also with those that do not reach it, until the position before it
is the best guess; so short drafts never rule out longer ones for good. Only outcomes count, never the
drafted tokens: lengths chosen from content would bias the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Positions beyond this share an estimate.
NUM_POSITIONS = 8


@dataclass(slots=True)
class _Estimate:
    """A decayed Beta estimate: `accepted` of `trials` pseudo-counts."""

    trials: float = 0.0
    accepted: float = 0.0

    def fade(self, decay: float) -> None:
        self.trials *= decay
        self.accepted *= decay

    def add(self, *, was_accepted: bool) -> None:
        self.trials += 1.0
        self.accepted += was_accepted

    def mean(self, prior: float, prior_trials: float) -> float:
        return (self.accepted + prior * prior_trials) / (self.trials + prior_trials)


@dataclass(slots=True)
class AcceptanceProfile:
    """Acceptance by position, for one proposer: of all requests, or of one."""

    positions: list[_Estimate] = field(default_factory=lambda: [_Estimate() for _ in range(NUM_POSITIONS)])

    def observe(self, *, num_draft_tokens: int, num_accepted_tokens: int, decay: float) -> None:
        for estimate in self.positions:
            estimate.fade(decay)
        for position in range(min(num_draft_tokens, num_accepted_tokens + 1)):
            self.positions[min(position, NUM_POSITIONS - 1)].add(was_accepted=position < num_accepted_tokens)

    def conditional(self, position: int, prior: float, prior_trials: float) -> float:
        return self.positions[min(position, NUM_POSITIONS - 1)].mean(prior, prior_trials)


class AcceptanceTracker:
    """Profiles of all proposers, of each kind of draft, and of each request with each kind."""

    # About the last 50 drafts count for the server, the last 10 for a request.
    GLOBAL_DECAY = 0.98
    REQUEST_DECAY = 0.9
    PROBE_DECAY = 0.8
    # What an estimate is worth before anything was seen, in trials.
    INITIAL_ACCEPTANCE = 0.6
    INITIAL_TRIALS = 2.0
    REQUEST_PRIOR_TRIALS = 3.0

    def __init__(self) -> None:
        self._proposers: dict[str, AcceptanceProfile] = {}
        self._global: dict[str, AcceptanceProfile] = {}
        self._requests: dict[str, dict[str, AcceptanceProfile]] = {}

    def observe(
        self,
        request_id: str,
        proposer: str,
        kind: str,
        *,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        is_probe: bool = False,
    ) -> None:
        """Counts one verified draft. Probes are rare, so each of them weighs more."""
        of_proposer = self._proposers.setdefault(proposer, AcceptanceProfile())
        of_all = self._global.setdefault(kind, AcceptanceProfile())
        of_request = self._requests.setdefault(request_id, {}).setdefault(kind, AcceptanceProfile())
        shared_decay = self.PROBE_DECAY if is_probe else self.GLOBAL_DECAY
        decays = (shared_decay, shared_decay, self.REQUEST_DECAY)
        for profile, decay in zip((of_proposer, of_all, of_request), decays, strict=True):
            profile.observe(
                num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, decay=decay
            )

    def survivals(self, request_id: str, kind: str, length: int) -> list[float]:
        """Probability that draft token j is accepted, for j in 0..length: a falling sequence."""
        of_all = self._global.get(kind)
        of_request = self._requests.get(request_id, {}).get(kind)
        conditional, survival = self.INITIAL_ACCEPTANCE, 1.0
        result: list[float] = []
        for position in range(length):
            if of_all is not None:
                conditional = of_all.conditional(position, conditional, self.INITIAL_TRIALS)
            own = conditional
            if of_request is not None:
                own = of_request.conditional(position, conditional, self.REQUEST_PRIOR_TRIALS)
            survival *= own
            result.append(survival)
        return result

    def first_acceptance(self, proposer: str) -> float:
        """Acceptance of the first position, over all requests."""
        of_proposer = self._proposers.get(proposer)
        if of_proposer is None:
            return self.INITIAL_ACCEPTANCE
        return of_proposer.conditional(0, self.INITIAL_ACCEPTANCE, self.INITIAL_TRIALS)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
