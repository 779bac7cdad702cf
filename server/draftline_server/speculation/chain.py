"""Which proposer serves which request: the first of its methods that has something to offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftline_server.core.request import Request
from draftline_server.speculation.proposer import Draft, DraftTask, Proposer


@dataclass(frozen=True, slots=True)
class Offer:
    """A proposer's offer to draft for a request in this step."""

    request: Request
    proposer: str
    max_length: int


class ProposerChain:
    """All proposers of a server, in the configured order."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = {proposer.name: proposer for proposer in proposers}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._proposers)

    def offer(self, request: Request, limit: int) -> Offer | None:
        """The offer of the request's first willing proposer, of at most `limit` tokens."""
        wanted = request.spec.speculation
        if limit <= 0 or wanted.enabled is False:
            return None
        if wanted.max_draft_tokens is not None:
            limit = min(limit, wanted.max_draft_tokens)
        for name in wanted.methods or self.names:
            length = self._proposers[name].max_length(request, limit)
            if length > 0:
                return Offer(request, name, length)
        return None

    def propose(self, offers: Sequence[Offer], lengths: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts by request id; `lengths` gives the tokens wanted, by request id."""
        drafts: dict[str, Draft] = {}
        for name, proposer in self._proposers.items():
            tasks = [
                DraftTask(o.request, lengths[o.request.request_id])
                for o in offers
                if o.proposer == name and lengths.get(o.request.request_id, 0) > 0
            ]
            if tasks:
                for task, draft in zip(tasks, proposer.propose(tasks), strict=True):
                    if draft.token_ids:
                        drafts[task.request.request_id] = draft
        return drafts

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
