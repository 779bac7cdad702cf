"""Drafts by a head that reads the target's hidden states (EAGLE-3).

Its first forward of a draft reads the committed tokens since the last one, each with what the target has
computed for the token before; that replaces what the head had guessed for rejected and accepted drafts
alike. The forwards that follow read its own output instead.

    slot             [ draft_len ........ newest ]    newest + 1       newest + 2
    token              x[draft_len] ...  x[newest]    d0               d1
    vector             the target's, of the token     its own          its own
                       before                         → d1             → d2
                                         → d0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftline_server.core.request import Request
from draftline_server.model.head_runner import HeadRunner
from draftline_server.model.runner import SequenceInput
from draftline_server.speculation.drafting import draft_by
from draftline_server.speculation.hidden_state_store import HiddenStateStore
from draftline_server.speculation.proposer import Draft, DraftTask


class DraftHeadProposer:
    """A draft model of its own kind: what it has not been shown it can never catch up with."""

    name = "draft_model"
    reads_hidden_states = True

    def __init__(
        self,
        runner: HeadRunner,
        store: HiddenStateStore,
        *,
        max_batched_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._runner = runner
        self._store = store
        self._max_batched_tokens = max_batched_tokens
        self._eos_token_ids = eos_token_ids

    def observe(self, request: Request, start: int, hidden_states: Tensor) -> None:
        self._store.add(request, start, hidden_states)

    def max_length(self, request: Request, limit: int) -> int:
        return limit if self._store.has(request) else 0

    def kind(self, request: Request) -> str:
        return self.name

    def lags(self, request: Request) -> bool:
        """What it has missed does not come back; what it might miss, while others draft, it reads in time."""
        return self._store.has_many(request)

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        vectors: dict[int, Tensor] = {}

        def forward(active: Sequence[int], drafted: Sequence[list[int]]) -> Tensor:
            requests = [tasks[i].request for i in active]
            if drafted[active[0]]:
                inputs = [_guess(r, drafted[i]) for r, i in zip(requests, active, strict=True)]
                read = torch.stack([vectors[i] for i in active])
            else:
                inputs = [_committed(r, r.num_tokens, num_logits=1) for r in requests]
                read = self._take(requests, [r.num_tokens for r in requests])
            logits, last = self._runner.draft(inputs, read)
            vectors.update(zip(active, last, strict=True))
            return logits

        return draft_by(self.name, tasks, forward, self._eos_token_ids)

    @torch.inference_mode()
    def follow(self, requests: Sequence[Request]) -> None:
        """Reads committed tokens that the target has read, up to the step's token budget."""
        budget = self._max_batched_tokens
        inputs: list[SequenceInput] = []
        stops: list[int] = []
        followed: list[Request] = []
        for request in requests:
            stop = min(request.target_len, request.draft_len + budget)
            if self._store.has(request) and request.draft_len < stop:
                inputs.append(_committed(request, stop, num_logits=0))
                budget -= stop - request.draft_len
                followed.append(request)
                stops.append(stop)
        if inputs:
            self._runner.draft(inputs, self._take(followed, stops))

    def release(self, request: Request) -> None:
        self._store.forget(request)

    def _take(self, requests: Sequence[Request], stops: Sequence[int]) -> Tensor:
        """The target's vectors for slots up to `stops`, which count as read from now on."""
        captured = [self._store.take(request, stop) for request, stop in zip(requests, stops, strict=True)]
        for request, stop in zip(requests, stops, strict=True):
            request.draft_len = stop
        return self._runner.fuse(torch.cat(captured))


def _committed(request: Request, stop: int, *, num_logits: int) -> SequenceInput:
    start = request.draft_len
    return SequenceInput(
        request.token_ids[start:stop], start, request.block_table, num_logits, first_key=_first_key(request)
    )


def _guess(request: Request, drafted: Sequence[int]) -> SequenceInput:
    start = request.num_tokens + len(drafted) - 1
    return SequenceInput([drafted[-1]], start, request.block_table, 1, first_key=_first_key(request))


def _first_key(request: Request) -> int:
    return max(1, request.draft_start)  # slot 0 has no token before it
