"""Runs a draft head over whole texts as if it drafted from each of their tokens at once, for training.

Row ``r`` of a text stands for the draft that begins after token ``x[r + 1]``. In step 0 all rows read what
the target computed; in step ``t`` row ``r`` has drafted ``t`` tokens and reads its own output:

    step   token read     vector read        keys it sees                     says of
    0      x[r + 1]       target's, of r     step 0, rows <= r                x[r + 2]
    t      x[r + 1 + t]   its own of t - 1   those, and its own of 1 .. t     x[r + 2 + t]

Tokens are the text's own ("training-time test" of EAGLE-3, arXiv 2503.01840), so that all rows are one batch.
What a row learns in its later steps is much like what its neighbours do, so not all rows need go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from draftline_server.model.draft_head import DraftHead

IMPLEMENTATION = "draftline_unrolled"


class UnrolledKeys:
    """What the steps so far have left for those that follow."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        """``[batch, kept rows]``, those that go on after step 0."""
        self.steps: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        """Keys and values by layer, each ``[batch, kv heads, rows, head size]``."""


def unroll(
    head: DraftHead, token_ids: Tensor, captured: Tensor, num_steps: int, *, rows: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The head's vectors ``[batch, R, hidden size]`` of each step, and the rows ``[batch, R]`` they are of.

    Takes ``token_ids [batch, all rows + 1]`` and the target's ``captured [batch, all rows + 1, captured
    size]``. After step 0 the `rows` ``[batch, kept rows]`` go on, without them all do. In step ``t`` the last
    ``t`` of all rows have no token left to read, and say nothing.
    """
    batch, length = token_ids.shape
    every = torch.arange(length - 1, device=token_ids.device).expand(batch, -1)
    rows = every if rows is None else rows
    keys = UnrolledKeys(rows)
    vectors = head(token_ids[:, 1:], head.fuse(captured[:, :-1]), every + 1, unrolled=keys)
    yield vectors, every
    vectors = vectors.gather(1, rows[..., None].expand(-1, -1, vectors.shape[-1]))
    for step in range(1, num_steps):
        read = rows + 1 + step
        vectors = head(token_ids.gather(1, read.clamp(max=length - 1)), vectors, read, unrolled=keys)
        yield vectors, rows


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
        # Computed again for its gradient: kept, the weights of all steps would fill the memory.
        attended = checkpoint(
            _attend_with_own, query * scaling, tuple(steps), unrolled.rows, use_reentrant=False
        )
    return attended.transpose(1, 2), None


def _attend_with_own(query: Tensor, steps: Sequence[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
    """Attention over the rows of step 0 up to one's own, and over one's own row in the later steps."""
    batch, num_heads, num_rows, size = query.shape
    first_key, first_value = steps[0]
    num_kv_heads, num_keys = first_key.shape[1:3]
    grouped = query.view(batch, num_kv_heads, -1, num_rows, size)
    scores = grouped @ first_key.unsqueeze(2).transpose(-1, -2)
    is_future = torch.arange(num_keys, device=rows.device) > rows[..., None]
    scores = scores.masked_fill(is_future[:, None, None], float("-inf"))
    own = [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in steps[1:]]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1, dtype=torch.float32).to(query.dtype)
    attended = weights[..., :num_keys] @ first_value.unsqueeze(2)
    for index, (_, value) in enumerate(steps[1:]):
        attended = attended + weights[..., num_keys + index, None] * value.unsqueeze(2)
    return attended.reshape(batch, num_heads, num_rows, size)


def register() -> None:
    """Makes the function known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, unrolled_attention)
