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

from collections.abc import Sequence
from dataclasses import dataclass
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
    """1 to k + 1 output tokens: the draft tokens that stand, and a recovered or bonus token."""

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
    return RowContext(params, request.spec.prompt_token_ids, output, end_token_ids)


@torch.inference_mode()
def verify(logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verified]:
    """Verifies all drafts of a step. `logits` ``[sum of num_rows, vocab]`` may be written to."""
    processed = process_logits(logits, [row for task in tasks for row in task.rows()])
    drawn = sample(processed, [key for task in tasks for key in task.noise_keys()])
    results: list[Verified] = []
    start = 0
    for task in tasks:
        rows = slice(start, start + task.num_rows)
        start = rows.stop
        if task.draft is not None and task.draft.probs is not None:
            results.append(_verify_by_rejection(task, task.draft.probs, processed[rows], drawn[rows]))
        else:
            results.append(_verify_by_match(task.draft_token_ids, drawn[rows]))
    return results


def _verify_by_match(draft_token_ids: Sequence[int], drawn: Sequence[int]) -> Verified:
    for j, (drafted, own) in enumerate(zip(draft_token_ids, drawn, strict=False)):
        if drafted != own:
            return Verified(tuple(drawn[: j + 1]))
    return Verified(tuple(drawn))


def _verify_by_rejection(
    task: VerifyTask, draft_probs: Tensor, processed: Tensor, drawn: Sequence[int]
) -> Verified:
    """`draft_probs` ``[k, vocab]`` is q, `processed` ``[k + 1, vocab]`` the logits of p."""
    request, drafted = task.request, task.draft_token_ids
    target_probs = torch.softmax(processed[:-1], dim=-1)
    index = torch.tensor(drafted, device=processed.device).unsqueeze(1)
    p = target_probs.gather(1, index).squeeze(1).tolist()
    q = draft_probs.gather(1, index).squeeze(1).tolist()
    for j in range(len(drafted)):
        position = request.num_tokens + j
        if uniform_noise(noise_key(request.seed, position, Stream.ACCEPT)) * q[j] < p[j]:
            continue
        recovered = _recover(
            target_probs[j], draft_probs[j], noise_key(request.seed, position, Stream.TARGET)
        )
        return Verified((*drafted[:j], recovered))
    return Verified((*drafted, drawn[-1]))


def _recover(target_probs: Tensor, draft_probs: Tensor, key: int) -> int:
    """Draws from the part of p that q does not cover."""
    residual = (target_probs - draft_probs).clamp_(min=0.0)
    # Where p and q are equal up to rounding, nothing is left to draw from; p itself is then right.
    weights = residual if float(residual.sum()) > 1e-6 else target_probs
    return sample_probs(weights.unsqueeze(0), [key])[0]
