"""Attention over the paged cache, called by unmodified transformers models.

Input is packed: the tokens of all sequences of a step lie one behind the other in ``[1, T]``. Each
sequence feeds its newest `query_length` tokens and sees its whole cache up to each of them:

    sequence   [ cached ............ | fed now ]
    query i    sees key positions  <= its own, and > its own - window where the layer has a window,
               and >= first_key where the first ones were never written

Sequences that feed few tokens (decodes, drafts to verify) are padded into one batch; a prefill chunk
goes by itself. Cost is the sum of query_length * kv_length, not the product of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from draftline_server.model import cpu_kernels
from draftline_server.model.cpu_kernels import CpuKernels
from draftline_server.model.kv_cache import KVCache

IMPLEMENTATION = "draftline"

# Up to this many queries of a sequence are worth padding into a batch with others.
MAX_BATCHED_QUERY_LENGTH = 32
# A batch holds sequences whose cache is at most this many times as long as its shortest one's.
MAX_LENGTH_RATIO = 2
MIN_BUCKET_LENGTH = 64
# Queries whose scores are computed at once where they are capped: these are held for all heads and tokens.
MAX_CAPPED_QUERIES = 128


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Where one sequence lies in the packed tokens and in the cache."""

    start: int
    """Index of its first token in the packed input."""
    query_length: int
    kv_length: int
    """Cached tokens including those fed now."""
    block_table: Sequence[int]
    first_key: int = 0
    """Position of the first key that is there."""


@dataclass(slots=True)
class AttentionGroup:
    """Sequences that attend in one call, padded to a common number of queries and of blocks."""

    rows: Tensor
    """Packed index of each query, ``[batch, queries]``; padding repeats a row of the sequence."""
    row_slice: slice | None
    """The same as `rows` where these are consecutive: slicing copies nothing."""
    block_ids: Tensor
    """``[batch, blocks]``; padding repeats a block of the sequence, which the mask hides."""
    query_positions: Tensor
    """``[batch, queries, 1]``."""
    key_positions: Tensor
    """``[1, 1, tokens]``."""
    first_keys: Tensor | None
    """``[batch, 1, 1]``; None where all begin at 0."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """True where a query sees a key, ``[batch, 1, queries, tokens]``. One tensor for all layers."""
        if window not in self._masks:
            visible = self.key_positions <= self.query_positions
            if self.first_keys is not None:
                visible &= self.key_positions >= self.first_keys
            if window is not None:
                visible &= self.key_positions > self.query_positions - window
            self._masks[window] = visible.unsqueeze(1)
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class KernelBatch:
    """Sequences that our CPU kernel serves; it needs neither padding nor masks nor gathered keys."""

    kernels: CpuKernels
    starts: Tensor
    """``[sequences]`` int32, as the next three."""
    query_lengths: Tensor
    kv_lengths: Tensor
    first_keys: Tensor
    tables: Tensor
    """``[sequences, blocks]`` int32."""


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What the attention function must know about a step; the same for all layers."""

    cache: KVCache
    slots: Tensor
    """Where each packed token's key and value go, ``[T]``."""
    kernel_batch: KernelBatch | None
    groups: tuple[AttentionGroup, ...]


def build_context(
    cache: KVCache, slots: Tensor, spans: Sequence[SequenceSpan], *, kernels: CpuKernels | None
) -> PagedContext:
    """Sorts the sequences of a step by how they attend."""
    device = cache.keys.device
    if kernels is None:
        groups = _build_groups(spans, block_size=cache.block_size, device=device)
        return PagedContext(cache, slots, None, groups)
    short = [s for s in spans if s.query_length <= MAX_BATCHED_QUERY_LENGTH]
    long = [s for s in spans if s.query_length > MAX_BATCHED_QUERY_LENGTH]
    batch = _build_kernel_batch(short, kernels, cache.block_size) if short else None
    return PagedContext(cache, slots, batch, _build_groups(long, block_size=cache.block_size, device=device))


def usable_kernels(cache: KVCache, *, num_heads: int) -> CpuKernels | None:
    """Our kernels where they can serve a model with this cache."""
    if cache.keys.device.type != "cpu" or cache.keys.dtype != torch.float32:
        return None
    num_kv_heads, head_dim = cache.keys.shape[-2:]
    if not cpu_kernels.can_attend(head_dim=head_dim, group_size=num_heads // num_kv_heads):
        return None
    return cpu_kernels.load()


def _build_kernel_batch(spans: Sequence[SequenceSpan], kernels: CpuKernels, block_size: int) -> KernelBatch:
    num_blocks = [-(-s.kv_length // block_size) for s in spans]
    width = max(num_blocks)
    tables = [
        [*s.block_table[:count], *[0] * (width - count)] for s, count in zip(spans, num_blocks, strict=True)
    ]
    return KernelBatch(
        kernels=kernels,
        starts=torch.tensor([s.start for s in spans], dtype=torch.int32),
        query_lengths=torch.tensor([s.query_length for s in spans], dtype=torch.int32),
        kv_lengths=torch.tensor([s.kv_length for s in spans], dtype=torch.int32),
        first_keys=torch.tensor([s.first_key for s in spans], dtype=torch.int32),
        tables=torch.tensor(tables, dtype=torch.int32),
    )


def _build_groups(
    spans: Sequence[SequenceSpan], *, block_size: int, device: torch.device
) -> tuple[AttentionGroup, ...]:
    """Sorts sequences into groups of similar shape."""
    batched = [s for s in spans if s.query_length <= MAX_BATCHED_QUERY_LENGTH]
    alone = [s for s in spans if s.query_length > MAX_BATCHED_QUERY_LENGTH]
    groups: list[list[SequenceSpan]] = [[s] for s in alone]
    bucket: list[SequenceSpan] = []
    # All of one length ratio stay in packed order, so that a uniform batch needs no index.
    for span in batched if _is_uniform(batched) else sorted(batched, key=lambda s: s.kv_length):
        limit = MAX_LENGTH_RATIO * max(MIN_BUCKET_LENGTH, bucket[0].kv_length) if bucket else 0
        if bucket and span.kv_length > limit:
            groups.append(bucket)
            bucket = []
        bucket.append(span)
    if bucket:
        groups.append(bucket)
    return tuple(_build_group(g, block_size=block_size, device=device) for g in groups)


def _is_uniform(spans: Sequence[SequenceSpan]) -> bool:
    lengths = [max(MIN_BUCKET_LENGTH, s.kv_length) for s in spans]
    return not lengths or max(lengths) <= MAX_LENGTH_RATIO * min(lengths)


def _build_group(spans: Sequence[SequenceSpan], *, block_size: int, device: torch.device) -> AttentionGroup:
    num_queries = max(s.query_length for s in spans)
    num_blocks = max(-(-s.kv_length // block_size) for s in spans)
    rows, positions, block_ids = [], [], []
    for span in spans:
        # Padding repeats the last query: it computes the same value into the same row.
        offsets = [min(i, span.query_length - 1) for i in range(num_queries)]
        rows.append([span.start + i for i in offsets])
        first = span.kv_length - span.query_length
        positions.append([[first + i] for i in offsets])
        used = list(span.block_table[: -(-span.kv_length // block_size)])
        # Never another's, even hidden: what is NaN there would be NaN here.
        block_ids.append(used + used[-1:] * (num_blocks - len(used)))
    flat = [row for sequence in rows for row in sequence]
    is_consecutive = flat == list(range(flat[0], flat[0] + len(flat)))
    return AttentionGroup(
        rows=torch.tensor(rows, device=device),
        row_slice=slice(flat[0], flat[0] + len(flat)) if is_consecutive else None,
        block_ids=torch.tensor(block_ids, device=device),
        query_positions=torch.tensor(positions, device=device),
        key_positions=torch.arange(num_blocks * block_size, device=device).view(1, 1, -1),
        first_keys=_first_keys(spans, device),
    )


def _first_keys(spans: Sequence[SequenceSpan], device: torch.device) -> Tensor | None:
    if not any(span.first_key for span in spans):
        return None
    return torch.tensor([span.first_key for span in spans], device=device).view(-1, 1, 1)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    paged: PagedContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer.

    Takes ``query [1, H, T, D]`` and ``key, value [1, Hkv, T, D]``; returns ``[1, T, H, D]``.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    _write(paged, layer, key[0], value[0])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = query[0].transpose(0, 1)
    output = attend(paged, layer, packed, scaling=scaling, window=sliding_window, softcap=softcap)
    return output.unsqueeze(0), None


def attend(
    paged: PagedContext,
    layer: int,
    packed: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of queries ``[T, H, D]`` whose keys and values are in the cache; returns the same shape."""
    batch = paged.kernel_batch
    if batch is None:
        output = torch.empty_like(packed, memory_format=torch.contiguous_format)
    else:
        output = batch.kernels.attention(
            packed,
            paged.cache.keys[layer],
            paged.cache.values[layer],
            starts=batch.starts,
            query_lengths=batch.query_lengths,
            kv_lengths=batch.kv_lengths,
            first_keys=batch.first_keys,
            tables=batch.tables,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )
    for group in paged.groups:
        batch_size, num_queries = group.rows.shape
        queries = packed[group.row_slice] if group.row_slice else packed[group.rows.flatten()]
        queries = queries.view(batch_size, num_queries, *packed.shape[1:]).transpose(1, 2)
        keys, values = paged.cache.gather(layer, group.block_ids)
        attended = _attend(queries, keys, values, group.mask(window), scaling, softcap)
        attended = attended.transpose(1, 2).reshape(-1, *packed.shape[1:])
        if group.row_slice:
            output[group.row_slice] = attended
        else:
            output[group.rows.flatten()] = attended
    return output


def _write(paged: PagedContext, layer: int, keys: Tensor, values: Tensor) -> None:
    """Stores ``[Hkv, T, D]``."""
    if paged.kernel_batch is None or keys.stride(2) != 1 or values.stride(2) != 1:
        paged.cache.write(layer, paged.slots, keys.transpose(0, 1), values.transpose(0, 1))
    else:
        kernels = paged.kernel_batch.kernels
        kernels.write(paged.cache.keys[layer], paged.slots, keys)
        kernels.write(paged.cache.values[layer], paged.slots, values)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """``[batch, H, queries, D]`` over ``[batch, Hkv, tokens, D]``."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    num_rows = max(1, MAX_CAPPED_QUERIES // queries.shape[0])
    slices = [slice(start, start + num_rows) for start in range(0, queries.shape[2], num_rows)]
    return torch.cat(
        [
            _attend_capped(queries[:, :, rows], keys, values, mask[:, :, rows], scaling, softcap)
            for rows in slices
        ],
        dim=2,
    )


def _attend_capped(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float
) -> Tensor:
    """As `_attend`; besides the scores it holds their softmax, both in float32 at most."""
    batch_size, num_kv_heads = keys.shape[:2]
    # The queries that share keys one below the other, so that no key is copied.
    grouped = queries.reshape(batch_size, num_kv_heads, -1, queries.shape[-1])
    scores = grouped @ keys.transpose(-1, -2)
    scores.mul_(scaling).div_(softcap).tanh_().mul_(softcap)
    scores.view(*queries.shape[:-1], -1).masked_fill_(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(queries.dtype)
    return (weights @ values).view(queries.shape)


def register() -> None:
    """Makes the function known to transformers as ``attn_implementation="draftline"``."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
