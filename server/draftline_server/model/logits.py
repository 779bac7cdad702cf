"""From a model's logits to the distribution that a request asked for, row by row.

One row is one position of one request. The order is: logit bias, penalties, min_tokens; temperature;
top-k, top-p, min-p. Target and draft rows go through the same function, since a draft that samples
as the target does is accepted most often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline_server.core.sampling_params import SamplingParams

# Filters look at so many of the highest logits, and at more only for rows that need them: sorting a whole
# vocabulary takes ten times as long.
NUM_CANDIDATES = (512, 4096)
# Finite still after division by the smallest temperature: the softmax of an infinite logit is NaN.
_LARGEST_LOGIT = 1e30


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the distribution of one position depends on, besides the logits."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    """In any order; each once is enough."""
    output_token_ids: Sequence[int]
    """Everything before the position, draft tokens included."""
    end_token_ids: frozenset[int]
    """Tokens that would end generation; impossible before min_tokens."""

    @property
    def needs_adjustment(self) -> bool:
        return bool(
            self.params.logit_bias
            or self.params.has_penalties
            or len(self.output_token_ids) < self.params.min_tokens
        )

    @property
    def needs_filter(self) -> bool:
        params = self.params
        return not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def process_logits(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """Returns processed float32 logits ``[rows, vocab]``; impossible tokens are -inf.

    May write into `logits`. Greedy rows are adjusted but neither scaled nor filtered.
    """
    for index, row in enumerate(rows):
        if row.needs_adjustment:
            _adjust(logits[index], row)
    temperatures = [1.0 if r.params.is_greedy else r.params.temperature for r in rows]
    if any(t != 1.0 for t in temperatures):
        logits /= torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    filtered = [i for i, row in enumerate(rows) if row.needs_filter]
    if len(filtered) == len(rows):
        return _filter(logits, [r.params for r in rows])
    if filtered:
        selected = torch.tensor(filtered, device=logits.device)
        logits[selected] = _filter(logits[selected], [rows[i].params for i in filtered])
    return logits


def _adjust(logits: Tensor, row: RowContext) -> None:
    """Applies bias, penalties and min_tokens to one row ``[vocab]``, in place."""
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.has_penalties:
        _penalize(logits, row)
    if len(row.output_token_ids) < params.min_tokens:
        logits[list(row.end_token_ids)] = float("-inf")


def _penalize(logits: Tensor, row: RowContext) -> None:
    params = row.params
    counts = Counter(row.output_token_ids)
    if params.repetition_penalty != 1.0:
        # An id may be there twice; both times the same value is written.
        seen = torch.tensor([*row.prompt_token_ids, *counts], device=logits.device)
        values = logits[seen]
        penalized = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        logits[seen] = penalized.clamp_(-_LARGEST_LOGIT, _LARGEST_LOGIT)
    if counts and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.frequency_penalty * times + params.presence_penalty


def _filter(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets to -inf what top-k, then top-p, then min-p leave out. ``[rows, vocab]``.

    Tokens with the logit of the last one kept are kept with it, so that no order among equals matters.
    """
    vocab_size = logits.shape[-1]
    thresholds = logits.new_empty(len(params), 1)
    undecided = list(range(len(params)))
    for num_candidates in (*(n for n in NUM_CANDIDATES if n < vocab_size), vocab_size):
        rows = logits if len(undecided) == len(params) else logits[undecided]
        found, is_enough = _thresholds(rows, [params[i] for i in undecided], num_candidates)
        thresholds[undecided] = found
        undecided = [i for i, enough in zip(undecided, is_enough.tolist(), strict=True) if not enough]
        if not undecided:
            break
    return logits.masked_fill_(logits < thresholds, float("-inf"))


def _thresholds(
    logits: Tensor, params: Sequence[SamplingParams], num_candidates: int
) -> tuple[Tensor, Tensor]:
    """The smallest logit that each row keeps, ``[rows, 1]``, found among its `num_candidates` highest.

    Also whether these were enough to tell, ``[rows]``. All three filters keep a head of the falling
    probabilities.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    values = logits.topk(num_candidates, dim=-1).values
    top_k = torch.tensor([p.top_k if p.top_k > 0 else vocab_size for p in params], device=device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], device=device).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], device=device).unsqueeze(1)
    is_limited = top_k < vocab_size
    kept = torch.arange(num_candidates, device=device) < top_k
    # Without top-k the probabilities are those of the whole row, else of the k kept.
    of_row = torch.softmax(logits, dim=-1).amax(dim=-1, keepdim=True) * (values - values[:, :1]).exp()
    of_kept = torch.softmax(values.masked_fill(~kept, float("-inf")), dim=-1)
    probs = torch.where(is_limited, of_kept, of_row)
    # A token stays while the probability before it has not reached top_p.
    before = probs.cumsum(dim=-1) - probs
    kept &= (before < top_p) | (top_p >= 1.0)
    kept &= probs >= min_p * probs[:, :1]
    kept[:, 0] = True  # a top_p so small that it is 0 in float32 would leave nothing
    is_enough = ~kept[:, -1:] & (~is_limited | (top_k <= num_candidates))
    if num_candidates == vocab_size:
        is_enough = torch.ones_like(is_enough)
    return values.gather(1, kept.sum(dim=-1, keepdim=True) - 1), is_enough.squeeze(1)


def top_logprobs(
    logits: Tensor, token_ids: Sequence[int], count: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row: the log-probability of its token, and the `count` best (token id, logprob)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1)
    if count == 0:
        return [(value, []) for value in chosen.tolist()]
    values, ids = logprobs.topk(count, dim=-1)
    tops = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(zip(chosen.tolist(), tops, strict=True))
