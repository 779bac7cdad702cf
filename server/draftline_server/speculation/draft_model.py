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
from draftline_server.model.logits import RowContext, process_logits
from draftline_server.model.noise import Stream, noise_key
from draftline_server.model.runner import ModelRunner, SequenceInput
from draftline_server.model.sampling import sample
from draftline_server.speculation.proposer import Draft, DraftTask
from draftline_server.speculation.verification import row_context

# A request that lags further behind does not draft until `follow` has caught up.
MAX_CATCH_UP_TOKENS = 512


class DraftModelProposer:
    """Samples the draft model with the request's own filters."""

    name = "draft_model"

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

    def lags(self, request: Request) -> bool:
        return request.num_tokens - request.draft_len > MAX_CATCH_UP_TOKENS

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafted: list[list[int]] = [[] for _ in tasks]
        probs: list[list[Tensor]] = [[] for _ in tasks]
        for depth in range(max((task.length for task in tasks), default=0)):
            active = [i for i, task in enumerate(tasks) if task.length > depth]
            logits = self._forward([tasks[i].request for i in active], [drafted[i] for i in active])
            contexts = [self._context(tasks[i].request, drafted[i]) for i in active]
            processed = process_logits(logits, contexts)
            keys = [self._key(tasks[i].request, depth) for i in active]
            for row, (i, token_id) in enumerate(zip(active, sample(processed, keys), strict=True)):
                drafted[i].append(token_id)
                if _samples_by_rejection(tasks[i].request):
                    probs[i].append(torch.softmax(processed[row], dim=-1))
        for task in tasks:
            if task.length > 0:
                task.request.draft_len = task.request.num_tokens + task.length - 1
        return [
            Draft(self.name, tuple(tokens), torch.stack(rows) if rows else None)
            for tokens, rows in zip(drafted, probs, strict=True)
        ]

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

    def _context(self, request: Request, drafted: Sequence[int]) -> RowContext:
        return row_context(request, drafted, request.end_token_ids(self._eos_token_ids))

    def _key(self, request: Request, depth: int) -> int | None:
        if request.spec.sampling.is_greedy:
            return None
        stream = Stream.DRAFT if _samples_by_rejection(request) else Stream.TARGET
        return noise_key(request.seed, request.num_tokens + depth, stream)


def _samples_by_rejection(request: Request) -> bool:
    """Requests with a seed match the target's noise instead, which makes their text reproducible."""
    return request.spec.sampling.seed is None and not request.spec.sampling.is_greedy
