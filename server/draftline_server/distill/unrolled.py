"""Runs a draft head over whole texts as if it drafted from each of their tokens at once, for training.

Row ``r`` of a text stands for the draft that begins after token ``x[r + 1]``. In step 0 all rows read what
the target computed; in step ``t`` row ``r`` has drafted ``t`` tokens and reads its own output:

    step   token read     vector read        keys it sees                     says of
    0      x[r + 1]       target's, of r     step 0, rows <= r                x[r + 2]
    t      x[r + 1 + t]   its own of t - 1   those, and its own of 1 .. t     x[r + 2 + t]

Tokens are the text's own ("training-time test" of EAGLE-3, arXiv 2503.01840), so that all rows are one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from draftline_server.model.draft_head import DraftHead

IMPLEMENTATION = "draftline_unrolled"


class UnrolledKeys:
    """Keys and values of the steps so far, by layer; each ``[batch, kv heads, rows, head size]``."""

    def __init__(self) -> None:
        self.steps: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)


def unroll(head: DraftHead, token_ids: Tensor, captured: Tensor, num_steps: int) -> Iterator[Tensor]:
    """The head's vectors ``[batch, rows, hidden size]`` of each step, for ``token_ids [batch, rows + 1]``.

    `captured` ``[batch, rows + 1, captured size]`` is the target's. In step ``t`` the last ``t`` rows have
    no token left to read, and say nothing.
    """
    num_rows = token_ids.shape[1] - 1
    vectors = head.fuse(captured[:, :-1])
    positions = torch.arange(1, num_rows + 1, device=token_ids.device).expand(token_ids.shape[0], -1)
    keys = UnrolledKeys()
    for step in range(num_steps):
        fed = functional.pad(token_ids[:, 1 + step :], (0, step))
        vectors = head(fed, vectors, positions + step, unrolled=keys)
        yield vectors


def unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    unrolled: UnrolledKeys,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer of a head.

    Takes ``query [batch, H, rows, D]`` and ``key, value [batch, Hkv, rows, D]``; returns
    ``[batch, rows, H, D]``.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    steps = unrolled.steps[layer]
    steps.append((key, value))
    if len(steps) == 1:
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    else:
        attended = _attend_with_own(query * scaling, steps)
    return attended.transpose(1, 2), None


def _attend_with_own(query: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over the rows of step 0 up to one's own, and over one's own row in the later steps."""
    batch, num_heads, num_rows, size = query.shape
    first_key, first_value = steps[0]
    num_kv_heads = first_key.shape[1]
    grouped = query.view(batch, num_kv_heads, -1, num_rows, size)
    scores = grouped @ first_key.unsqueeze(2).transpose(-1, -2)
    future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    own = [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in steps[1:]]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1, dtype=torch.float32).to(query.dtype)
    attended = weights[..., :num_rows] @ first_value.unsqueeze(2)
    for index, (_, value) in enumerate(steps[1:]):
        attended = attended + weights[..., num_rows + index, None] * value.unsqueeze(2)
    return attended.reshape(batch, num_heads, num_rows, size)


def register() -> None:
    """Makes the function known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, unrolled_attention)
