"""Decides which draft tokens stand, so that the output is distributed exactly as the target's.

For a request with draft ``d[0..k)`` the target gives k + 1 rows; row j is its distribution p after the
committed tokens and ``d[0..j)``. Two rules, both exact:

    match      the target draws its own y from row j; ``d[j]`` stands if it is y, else y replaces it.
               Greedy, one-hot drafts (n-gram) and drafts drawn with the target's own noise. The output
               is what the target alone would draw, token for token.
    rejection  ``d[j] ~ q`` stands with probability min(1, p/q), else a token drawn from
               max(p - q, 0) replaces it (Leviathan et al., arXiv 2211.17192). Accepts most often.

A draft that stands whole earns a bonus token from the last row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from draftline_server.core.request import Request
from draftline_server.model.logits import RowContext, process_logits
from draftline_server.model.noise import Stream, noise_key, uniform_noise
from draftline_server.model.sampling import sample, sample_probs
from draftline_server.speculation.proposer import Draft


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """A request that samples in this step, with its draft or without."""

    request: Request
    draft: Draft | None
    end_token_ids: frozenset[int]

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return self.draft.token_ids if self.draft is not None else ()

    @property
    def num_rows(self) -> int:
        return len(self.draft_token_ids) + 1

    def rows(self) -> list[RowContext]:
        """The context of each of its rows."""
        drafted = self.draft_token_ids
        return [row_context(self.request, drafted[:j], self.end_token_ids) for j in range(self.num_rows)]

    def noise_keys(self) -> list[int | None]:
        """The target's noise for each of its rows; None where it is greedy."""
        request = self.request
        if request.spec.sampling.is_greedy:
            return [None] * self.num_rows
        return [noise_key(request.seed, request.num_tokens + j, Stream.TARGET) for j in range(self.num_rows)]


@dataclass(frozen=True, slots=True)
class Verified:
    """1 to k + 1 output tokens: the draft tokens that stand, and a recovered or bonus token.

    None at all where the target's logits are no numbers.
    """

    token_ids: tuple[int, ...]

    @property
    def num_accepted_tokens(self) -> int:
        return len(self.token_ids) - 1


class Verify(Protocol):
    """The signature of `verify`; a bench may put another in its place."""

    def __call__(self, logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verified]: ...


def row_context(
    request: Request, draft_token_ids: Sequence[int], end_token_ids: frozenset[int]
) -> RowContext:
    """The context of the position after the committed tokens and `draft_token_ids`."""
    params = request.spec.sampling
    output: Sequence[int]
    if params.has_penalties:
        output = [*request.token_ids[request.num_prompt_tokens :], *draft_token_ids]
    else:
        # Only the number of tokens matters then (for min_tokens), so none is copied.
        output = range(request.num_output_tokens + len(draft_token_ids))
    return RowContext(params, request.distinct_prompt_token_ids, output, end_token_ids)


@torch.inference_mode()
def verify(logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verified]:
    """Verifies all drafts of a step. `logits` ``[sum of num_rows, vocab]`` may be written to."""
    processed = process_logits(logits, [row for task in tasks for row in task.rows()])
    drawn = sample(processed, [key for task in tasks for key in task.noise_keys()])
    verified = _verify_drawn(processed, drawn, tasks)
    are_numbers = _are_numbers(processed, drawn)
    if all(are_numbers):
        return verified
    first_rows = accumulate((task.num_rows for task in tasks), initial=0)
    return [
        v if all(are_numbers[first : first + len(v.token_ids)]) else Verified(())
        for v, first in zip(verified, first_rows, strict=False)
    ]


def _are_numbers(processed: Tensor, drawn: Sequence[int]) -> list[bool]:
    """Whether each row has logits: of one without any, what was drawn is no number either."""
    index = torch.tensor(drawn, device=processed.device).unsqueeze(1)
    found: list[bool] = processed.gather(1, index).squeeze(1).isfinite().tolist()
    return found


def _verify_drawn(processed: Tensor, drawn: Sequence[int], tasks: Sequence[VerifyTask]) -> list[Verified]:
    results: list[Verified | None] = []
    by_rejection: list[_Rejection] = []
    start = 0
    for task in tasks:
        own = drawn[start : start + task.num_rows]
        if task.draft is not None and task.draft.probs is not None:
            by_rejection.append(_Rejection(task, len(results), start, task.draft.probs, bonus=own[-1]))
            results.append(None)
        else:
            results.append(_verify_by_match(task.draft_token_ids, own))
        start += task.num_rows
    for item, verified in _verify_by_rejection(by_rejection, processed):
        results[item.index] = verified
    return [verified for verified in results if verified is not None]


def _verify_by_match(draft_token_ids: Sequence[int], drawn: Sequence[int]) -> Verified:
    for j, (drafted, own) in enumerate(zip(draft_token_ids, drawn, strict=False)):
        if drafted != own:
            return Verified(tuple(drawn[: j + 1]))
    return Verified(tuple(drawn))


@dataclass(frozen=True, slots=True)
class _Rejection:
    """One draft to verify by the rejection rule."""

    task: VerifyTask
    index: int
    """Where its outcome goes."""
    start: int
    """Its first row."""
    draft_probs: Tensor
    """q, ``[k, vocab]``."""
    bonus: int

    def num_accepted(self, p: Sequence[float], q: Sequence[float]) -> int:
        """How many of its tokens stand; `p` and `q` are their probabilities."""
        request = self.task.request
        for j in range(len(p)):
            key = noise_key(request.seed, request.num_tokens + j, Stream.ACCEPT)
            if not uniform_noise(key) * q[j] < p[j]:
                return j
        return len(p)


def _verify_by_rejection(
    items: Sequence[_Rejection], processed: Tensor
) -> Iterator[tuple[_Rejection, Verified]]:
    """All of a step together: three times the device is waited for, however many drafts there are."""
    if not items:
        return
    device = processed.device
    target_probs = torch.softmax(processed, dim=-1)
    rows = [item.start + j for item in items for j in range(len(item.task.draft_token_ids))]
    ids = torch.tensor([t for item in items for t in item.task.draft_token_ids], device=device)
    draft_probs = torch.cat([item.draft_probs for item in items])
    p = target_probs[torch.tensor(rows, device=device), ids].tolist()
    q = draft_probs.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
    rejected: list[tuple[_Rejection, int]] = []
    residual_rows: list[tuple[int, int]] = []
    first = 0
    for item in items:
        drafted = item.task.draft_token_ids
        end = first + len(drafted)
        count = item.num_accepted(p[first:end], q[first:end])
        if count == len(drafted):
            yield item, Verified((*drafted, item.bonus))
        else:
            rejected.append((item, count))
            residual_rows.append((item.start + count, first + count))
        first = end
    if rejected:
        target_rows, draft_rows = torch.tensor(residual_rows, device=device).unbind(dim=1)
        keys = [
            noise_key(item.task.request.seed, item.task.request.num_tokens + count, Stream.TARGET)
            for item, count in rejected
        ]
        recovered = _recover(target_probs[target_rows], draft_probs[draft_rows], keys)
        for (item, count), token_id in zip(rejected, recovered, strict=True):
            yield item, Verified((*item.task.draft_token_ids[:count], token_id))


def _recover(target_probs: Tensor, draft_probs: Tensor, keys: Sequence[int]) -> list[int]:
    """Draws from the part of p that q does not cover, for rows ``[rejected, vocab]``."""
    residual = (target_probs - draft_probs).clamp_(min=0.0)
    # Where p and q are equal up to rounding, nothing is left to draw from; p itself is then right. So it is
    # where q is no distribution, as of a draft model that overflows: no comparison with NaN is true.
    is_empty = ~(residual.sum(dim=-1, keepdim=True) > 1e-6)
    return sample_probs(torch.where(is_empty, target_probs, residual), keys)
