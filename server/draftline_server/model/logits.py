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

# Finite still after division by the smallest temperature: the softmax of an infinite logit is NaN.
_LARGEST_LOGIT = 1e30


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the distribution of one position depends on, besides the logits."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
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
        seen = torch.tensor(list(counts.keys() | set(row.prompt_token_ids)), device=logits.device)
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
    """Sets to -inf what top-k, then top-p, then min-p leave out. ``[rows, vocab]``."""
    device = logits.device
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor(
        [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], device=device
    )
    top_p = torch.tensor([p.top_p for p in params], device=device).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], device=device).unsqueeze(1)
    rank = torch.arange(vocab_size, device=device).unsqueeze(0)
    ordered = ordered.masked_fill(rank >= top_k.unsqueeze(1), float("-inf"))
    probs = torch.softmax(ordered, dim=-1)
    # A token stays while the probability before it has not reached top_p.
    before = probs.cumsum(dim=-1) - probs
    dropped = ((before >= top_p) & (top_p < 1.0)) | (probs < min_p * probs[:, :1])
    dropped[:, 0] = False  # a top_p so small that it is 0 in float32 would leave nothing
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.empty_like(ordered).scatter_(1, order, ordered)


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
