"""Paged attention equals plain softmax attention over each sequence's own tokens, whatever else is packed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftline_server.model.attention import (
    MAX_BATCHED_QUERY_LENGTH,
    MAX_CAPPED_QUERIES,
    PagedContext,
    SequenceSpan,
    build_context,
    paged_attention,
    usable_kernels,
)
from draftline_server.model.cpu_kernels import CpuKernels
from draftline_server.model.kv_cache import KVCache

BLOCK_SIZE = 4
NUM_BLOCKS = 160
LAYER = 1
CPU = torch.device("cpu")

MIXTURES = {
    # (query_length, kv_length) of each sequence
    "one-decode": [(1, 9)],
    "first-token-of-all": [(1, 1)],
    "uniform-decodes": [(1, 20), (1, 24), (1, 21)],
    "uniform-verification": [(4, 20), (4, 24)],
    "ragged-verification": [(1, 20), (6, 24), (3, 3)],
    "short-and-long-caches": [(1, 3), (2, 150), (1, 70), (5, 5)],
    "whole-prompt": [(40, 40)],
    "second-chunk": [(40, 73)],
    "all-together": [(1, 30), (40, 60), (5, 44), (1, 1), (33, 33), (3, 130)],
    "exactly-full-blocks": [(1, 8), (4, 16), (8, 8)],
    "long-prompts": [(130, 150), (1, 9), (300, 300)],
    "many-queries-in-a-batch": [(32, 40), (31, 33), (30, 30), (32, 60), (29, 44)],
}


class _Layer(nn.Module):
    """What the function reads of a transformers attention module."""

    layer_idx = LAYER


@dataclass
class Packed:
    """Sequences with all their keys and values, of which the newest are fed now."""

    context: PagedContext
    spans: list[SequenceSpan]
    query: Tensor
    keys: list[Tensor]
    """Of each sequence, ``[kv_length, kv_heads, dim]``, as the values."""
    values: list[Tensor]

    def attend(self, *, window: int | None, softcap: float | None, scaling: float | None) -> Tensor:
        """``[tokens, heads, dim]``."""
        new_keys, new_values = (
            torch.cat([rows[-s.query_length :] for rows, s in zip(side, self.spans, strict=True)])
            for side in (self.keys, self.values)
        )
        output, weights = paged_attention(
            _Layer(),
            self.query.transpose(0, 1).unsqueeze(0),
            new_keys.transpose(0, 1).unsqueeze(0),
            new_values.transpose(0, 1).unsqueeze(0),
            None,
            scaling,
            paged=self.context,
            sliding_window=window,
            softcap=softcap,
        )
        assert weights is None
        return output[0]

    def expected(self, *, window: int | None, softcap: float | None, scaling: float | None) -> Tensor:
        """The same, sequence by sequence, in double precision."""
        return torch.cat(
            [
                dense_attention(
                    self.query[span.start : span.start + span.query_length],
                    keys,
                    values,
                    window=window,
                    softcap=softcap,
                    scaling=scaling,
                )
                for span, keys, values in zip(self.spans, self.keys, self.values, strict=True)
            ]
        )


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    window: int | None,
    softcap: float | None,
    scaling: float | None,
) -> Tensor:
    """The newest queries ``[queries, heads, dim]`` over ``[tokens, kv_heads, dim]``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (side.double().repeat_interleave(group, dim=1) for side in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys)
    scores *= query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(keys) - len(query), len(keys)).unsqueeze(1) - torch.arange(len(keys))
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def pack(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    with_kernels: bool,
    seed: int = 0,
    garbage: float = 1e3,
) -> Packed:
    """Random sequences whose blocks lie anywhere in a cache full of garbage."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(kv_heads=kv_heads, dim=dim)
    cache.keys.fill_(garbage)
    cache.values.fill_(-garbage)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    spans: list[SequenceSpan] = []
    new_slots: list[int] = []
    all_keys, all_values = [], []
    for query_length, kv_length in lengths:
        # One block more than needed, as a request that had room for a draft has.
        table = [free.pop() for _ in range(-(-kv_length // BLOCK_SIZE) + 1)]
        slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(kv_length)]
        keys, values = (torch.randn(kv_length, kv_heads, dim, generator=generator) for _ in range(2))
        num_cached = kv_length - query_length
        cache.write(LAYER, torch.tensor(slots[:num_cached]).long(), keys[:num_cached], values[:num_cached])
        spans.append(SequenceSpan(len(new_slots), query_length, kv_length, table))
        new_slots += slots[num_cached:]
        all_keys.append(keys)
        all_values.append(values)
    query = torch.randn(len(new_slots), heads, dim, generator=generator)
    kernels = find_kernels(cache, heads) if with_kernels else None
    context = build_context(cache, torch.tensor(new_slots), spans, kernels=kernels)
    return Packed(context, spans, query, all_keys, all_values)


def make_cache(*, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(
        num_layers=2,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=CPU,
    )


def find_kernels(cache: KVCache, heads: int) -> CpuKernels:
    kernels = usable_kernels(cache, num_heads=heads)
    if kernels is None:
        pytest.skip("this machine cannot have the CPU kernels")
    return kernels


PATHS = pytest.mark.parametrize("with_kernels", [False, True], ids=["torch", "kernels"])


@PATHS
@pytest.mark.parametrize(
    ("window", "softcap"),
    [(None, None), (None, 1.5), (1, None), (5, 1.5), (64, None)],
    ids=["full", "softcap", "window-1", "window-5-softcap", "window-64"],
)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_mixture_of_sequences(
    mixture: str, window: int | None, softcap: float | None, *, with_kernels: bool
) -> None:
    packed = pack(MIXTURES[mixture], with_kernels=with_kernels)
    torch.testing.assert_close(
        packed.attend(window=window, softcap=softcap, scaling=None),
        packed.expected(window=window, softcap=softcap, scaling=None),
        atol=2e-5,
        rtol=1e-4,
    )


@PATHS
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(1, 1, 8), (4, 4, 16), (6, 2, 24), (8, 1, 64), (9, 3, 64), (2, 2, 40), (4, 2, 128)],
)
@pytest.mark.parametrize("scaling", [None, 0.25])
def test_every_shape_of_heads(
    heads: int, kv_heads: int, dim: int, scaling: float | None, *, with_kernels: bool
) -> None:
    packed = pack(
        MIXTURES["all-together"], heads=heads, kv_heads=kv_heads, dim=dim, with_kernels=with_kernels
    )
    torch.testing.assert_close(
        packed.attend(window=None, softcap=None, scaling=scaling),
        packed.expected(window=None, softcap=None, scaling=scaling),
        atol=5e-5,
        rtol=1e-4,
    )


@PATHS
@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int, *, with_kernels: bool) -> None:
    rng = random.Random(seed)
    lengths = []
    for _ in range(rng.randint(1, 7)):
        query_length = rng.choice([1, 1, 2, 6, MAX_BATCHED_QUERY_LENGTH, MAX_BATCHED_QUERY_LENGTH + 1])
        lengths.append((query_length, query_length + rng.choice([0, 1, 3, 30, 40])))
    window = rng.choice([None, 7])
    packed = pack(lengths, with_kernels=with_kernels, seed=seed)
    torch.testing.assert_close(
        packed.attend(window=window, softcap=None, scaling=None),
        packed.expected(window=window, softcap=None, scaling=None),
        atol=2e-5,
        rtol=1e-4,
    )


@PATHS
def test_a_sequence_is_computed_the_same_alone_and_in_any_company(*, with_kernels: bool) -> None:
    company = [(1, 30), (5, 44), (1, 1), (3, 130)]
    together = pack(company, with_kernels=with_kernels)
    attended = together.attend(window=None, softcap=None, scaling=None)
    for index, (query_length, kv_length) in enumerate(company):
        alone = pack([(query_length, kv_length)], with_kernels=with_kernels, seed=index + 1)
        alone.keys, alone.values = [together.keys[index]], [together.values[index]]
        start = together.spans[index].start
        alone.query = together.query[start : start + query_length]
        _write_history(alone)
        result = alone.attend(window=None, softcap=None, scaling=None)
        torch.testing.assert_close(result, attended[start : start + query_length], atol=1e-6, rtol=1e-5)


def _write_history(packed: Packed) -> None:
    (span,) = packed.spans
    num_cached = span.kv_length - span.query_length
    slots = [span.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(num_cached)]
    packed.context.cache.write(
        LAYER, torch.tensor(slots).long(), packed.keys[0][:num_cached], packed.values[0][:num_cached]
    )


@PATHS
def test_what_is_fed_is_stored_for_the_next_step_and_nothing_else_is_touched(*, with_kernels: bool) -> None:
    packed = pack([(3, 10), (1, 5)], with_kernels=with_kernels)
    cache = packed.context.cache
    before = cache.keys.clone()
    packed.attend(window=None, softcap=None, scaling=None)
    changed = (cache.keys != before).any(dim=-1).any(dim=-1).nonzero()
    written = {(int(layer), int(block * BLOCK_SIZE + offset)) for layer, block, offset in changed}
    assert written == {(LAYER, int(slot)) for slot in packed.context.slots}
    for span, keys, values in zip(packed.spans, packed.keys, packed.values, strict=True):
        blocks = torch.tensor([list(span.block_table)])
        stored_keys, stored_values = cache.gather(LAYER, blocks)
        assert torch.equal(stored_keys[0, :, : span.kv_length].transpose(0, 1), keys)
        assert torch.equal(stored_values[0, :, : span.kv_length].transpose(0, 1), values)


def test_the_kernels_never_read_what_belongs_to_others() -> None:
    packed = pack(MIXTURES["ragged-verification"], with_kernels=True, garbage=float("nan"))
    result = packed.attend(window=None, softcap=None, scaling=None)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        pytest.param(4, 2, 12, torch.float32, id="head-size"),
        pytest.param(4, 2, 264, torch.float32, id="large-heads"),
        pytest.param(66, 2, 8, torch.float32, id="large-groups"),
        pytest.param(4, 2, 8, torch.bfloat16, id="dtype"),
    ],
)
def test_what_the_kernels_cannot_do_is_left_to_torch(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    assert usable_kernels(make_cache(kv_heads=kv_heads, dim=dim, dtype=dtype), num_heads=heads) is None


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that any operation gives."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize(
    "lengths", [[(500, 600)], [(MAX_BATCHED_QUERY_LENGTH, 70)] * 8], ids=["prompt", "batch"]
)
def test_capped_scores_are_held_for_a_bounded_number_of_queries(lengths: list[tuple[int, int]]) -> None:
    heads, longest = 8, max(kv_length for _, kv_length in lengths)
    packed = pack(lengths, heads=heads, with_kernels=False)
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        packed.attend(window=None, softcap=1.5, scaling=None)
    blocks = -(-longest // BLOCK_SIZE)
    assert largest.num_elements <= MAX_CAPPED_QUERIES * heads * blocks * BLOCK_SIZE


def test_sequences_of_one_shape_share_a_group_that_copies_no_query() -> None:
    packed = pack(MIXTURES["uniform-verification"], with_kernels=False)
    (group,) = packed.context.groups
    assert group.row_slice == slice(0, 8)


def test_a_short_cache_is_not_padded_to_a_long_one() -> None:
    packed = pack([(1, 3), (1, 600), (1, 5)], with_kernels=False)
    assert sorted(group.block_ids.shape[1] for group in packed.context.groups) == [2, 150]


def test_a_prefill_chunk_does_not_pad_the_decodes_beside_it() -> None:
    packed = pack([(1, 40), (MAX_BATCHED_QUERY_LENGTH + 1, 40), (1, 40)], with_kernels=False)
    assert sorted(tuple(group.rows.shape) for group in packed.context.groups) == [
        (1, MAX_BATCHED_QUERY_LENGTH + 1),
        (2, 1),
    ]
