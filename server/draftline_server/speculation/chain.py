"""Which proposers could draft for which request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from draftline_server.core.request import Request
from draftline_server.speculation.proposer import Draft, DraftTask, Proposer


@dataclass(frozen=True, slots=True)
class Offer:
    """A proposer's offer to draft for a request in this step."""

    request: Request
    proposer: str
    max_length: int
    kind: str
    """See `Proposer.kind`."""


class ProposerChain:
    """All proposers of a server, in the configured order."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = {proposer.name: proposer for proposer in proposers}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._proposers)

    def offers(self, request: Request, limit: int, usable: Collection[str]) -> list[Offer]:
        """What the usable ones of its methods could draft for a request, in their order, at most `limit`."""
        wanted = request.spec.speculation
        if limit <= 0 or wanted.enabled is False:
            return []
        if wanted.max_draft_tokens is not None:
            limit = min(limit, wanted.max_draft_tokens)
        lengths = [
            (name, self._proposers[name].max_length(request, limit))
            for name in wanted.methods or self.names
            if name in usable
        ]
        return [
            Offer(request, name, length, self._proposers[name].kind(request))
            for name, length in lengths
            if length > 0
        ]

    def propose(self, tasks: Mapping[str, Sequence[DraftTask]]) -> dict[str, Draft]:
        """Drafts by request id; `tasks` are by proposer."""
        drafts: dict[str, Draft] = {}
        for name, own in tasks.items():
            for task, draft in zip(own, self._proposers[name].propose(own), strict=True):
                if draft.token_ids:
                    drafts[task.request.request_id] = draft
        return drafts

    def reads_hidden_states(self, request: Request) -> bool:
        """Whether any that may draft for the request does so from what the target computes."""
        return any(p.reads_hidden_states and self._may_use(request, p.name) for p in self._proposers.values())

    def observe(self, request: Request, start: int, hidden_states: Tensor) -> None:
        for proposer in self._proposers.values():
            if proposer.reads_hidden_states:
                proposer.observe(request, start, hidden_states)

    def follow(self, requests: Sequence[Request]) -> None:
        for proposer in self._proposers.values():
            proposer.follow([r for r in requests if self._may_use(r, proposer.name)])

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Lets one request go on that lags too far behind to be drafted for."""
        for proposer in self._proposers.values():
            lagging = [r for r in requests if proposer.lags(r) and self._may_use(r, proposer.name)]
            proposer.follow(lagging[:1])

    def release(self, request: Request) -> None:
        for proposer in self._proposers.values():
            proposer.release(request)

    def _may_use(self, request: Request, name: str) -> bool:
        wanted = request.spec.speculation
        return wanted.enabled is not False and name in (wanted.methods or self.names)
