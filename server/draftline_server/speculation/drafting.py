"""Draws a draft token by token from a model's logits, with each request's own filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftline_server.core.request import Request
from draftline_server.model.logits import RowContext, process_logits
from draftline_server.model.noise import Stream, noise_key
from draftline_server.model.sampling import sample
from draftline_server.speculation.proposer import Draft, DraftTask
from draftline_server.speculation.verification import row_context


class DraftForward(Protocol):
    """One forward of a draft."""

    def __call__(self, active: Sequence[int], drafted: Sequence[list[int]]) -> Tensor:
        """Logits ``[active, target vocab]`` after the committed tokens and `drafted` of the `active` tasks.

        Both are by index of the task; `drafted` is of all.
        """


def draft_by(
    name: str, tasks: Sequence[DraftTask], forward: DraftForward, eos_token_ids: frozenset[int]
) -> list[Draft]:
    """One draft for each task, of exactly its length."""
    drafted: list[list[int]] = [[] for _ in tasks]
    probs: list[list[Tensor]] = [[] for _ in tasks]
    for depth in range(max((task.length for task in tasks), default=0)):
        active = [i for i, task in enumerate(tasks) if task.length > depth]
        logits = forward(active, drafted)
        contexts = [_context(tasks[i].request, drafted[i], eos_token_ids) for i in active]
        processed = process_logits(logits, contexts)
        keys = [_key(tasks[i].request, depth) for i in active]
        for row, (i, token_id) in enumerate(zip(active, sample(processed, keys), strict=True)):
            drafted[i].append(token_id)
            if _samples_by_rejection(tasks[i].request):
                probs[i].append(torch.softmax(processed[row], dim=-1))
    return [
        Draft(name, tuple(tokens), torch.stack(rows) if rows else None)
        for tokens, rows in zip(drafted, probs, strict=True)
    ]


def _context(request: Request, drafted: Sequence[int], eos_token_ids: frozenset[int]) -> RowContext:
    return row_context(request, drafted, request.end_token_ids(eos_token_ids))


def _key(request: Request, depth: int) -> int | None:
    if request.spec.sampling.is_greedy:
        return None
    stream = Stream.DRAFT if _samples_by_rejection(request) else Stream.TARGET
    return noise_key(request.seed, request.num_tokens + depth, stream)


def _samples_by_rejection(request: Request) -> bool:
    """Requests with a seed match the target's noise instead, which makes their text reproducible."""
    return request.spec.sampling.seed is None and not request.spec.sampling.is_greedy
