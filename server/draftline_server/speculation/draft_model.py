"""Drafts by a smaller model with the same vocabulary, which keeps a cache of its own.

The draft's cache holds keys and values of the first `draft_len` committed tokens. Every proposal first
feeds what was committed since, however much that is: one token after a rejection, two when all
drafts stood (the last one was never fed), many after a phase without drafts.

    committed   [ draft_len )[ catch-up ........ newest ]
    fed         first forward: catch-up -> d0     then d0 -> d1, d1 -> d2, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from draftline_server.core.request import Request
from draftline_server.model.runner import ModelRunner, SequenceInput
from draftline_server.speculation.drafting import draft_by
from draftline_server.speculation.proposer import Draft, DraftTask

# A request that lags further behind does not draft until `follow` has caught up.
MAX_CATCH_UP_TOKENS = 512


class DraftModelProposer:
    """Samples the draft model with the request's own filters."""

    name = "draft_model"
    reads_hidden_states = False

    def __init__(
        self,
        runner: ModelRunner,
        *,
        target_vocab_size: int,
        max_batched_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._runner = runner
        self._target_vocab_size = target_vocab_size
        self._max_batched_tokens = max_batched_tokens
        self._eos_token_ids = eos_token_ids

    def max_length(self, request: Request, limit: int) -> int:
        return 0 if self.lags(request) else limit

    def kind(self, request: Request) -> str:
        return self.name

    def lags(self, request: Request) -> bool:
        return request.num_tokens - request.draft_len > min(MAX_CATCH_UP_TOKENS, self._max_batched_tokens)

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        def forward(active: Sequence[int], drafted: Sequence[list[int]]) -> Tensor:
            return self._forward([tasks[i].request for i in active], [drafted[i] for i in active])

        self._catch_up([task.request for task in tasks if task.length > 0])
        drafts = draft_by(self.name, tasks, forward, self._eos_token_ids)
        for task in tasks:
            if task.length > 0:
                task.request.draft_len = task.request.num_tokens + task.length - 1
        return drafts

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Until what is left to read fits into one forward."""
        while sum(r.num_tokens - r.draft_len for r in requests) > max(
            self._max_batched_tokens, len(requests)
        ):
            self.follow(requests)

    def observe(self, request: Request, start: int, hidden_states: Tensor) -> None:
        """Reads tokens alone."""

    @torch.inference_mode()
    def follow(self, requests: Sequence[Request]) -> None:
        """Feeds committed tokens that the target has read, up to the step's token budget."""
        budget = self._max_batched_tokens
        inputs: list[SequenceInput] = []
        for request in requests:
            start, stop = request.draft_len, min(request.target_len, request.draft_len + budget)
            if start < stop:
                tokens = self._known(request.token_ids[start:stop])
                inputs.append(SequenceInput(tokens, start, request.block_table, num_logits=0))
                request.draft_len = stop
                budget -= stop - start
        if inputs:
            self._runner.forward(inputs)

    def release(self, request: Request) -> None:
        """Nothing is kept outside the request."""

    def _forward(self, requests: Sequence[Request], drafted: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the committed tokens and the drafts so far, ``[requests, target vocab]``."""
        inputs: list[SequenceInput] = []
        for request, tokens in zip(requests, drafted, strict=True):
            fed: Sequence[int]
            if tokens:
                fed, start = [tokens[-1]], request.num_tokens + len(tokens) - 1
            else:
                fed, start = self._known(request.token_ids[request.draft_len :]), request.draft_len
            inputs.append(SequenceInput(fed, start, request.block_table, num_logits=1))
        logits = self._runner.forward(inputs)
        missing = self._target_vocab_size - logits.shape[-1]
        # Embedding rows beyond the tokenizer's vocabulary differ in number; no token lives there.
        return functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _known(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The ids as the draft model can read them.

        The target may have more embedding rows than the draft. No token lives there, yet a client may send
        such an id, or the target pick one; what the draft reads instead matters only to its guesses.
        """
        num_rows = self._runner.vocab_size
        if num_rows >= self._target_vocab_size:
            return token_ids
        return [token_id if token_id < num_rows else 0 for token_id in token_ids]
