"""Runs one model on packed tokens: builds the inputs, calls it once, returns the logits asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline_server.model.attention import PagedContext, SequenceSpan, build_context, usable_kernels
from draftline_server.model.cpu_kernels import CpuKernels
from draftline_server.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """What one sequence feeds in a step."""

    token_ids: Sequence[int]
    start: int
    """Position of the first of `token_ids` in the sequence."""
    block_table: Sequence[int]
    num_logits: int
    """Logits are wanted after each of the last `num_logits` tokens."""
    first_key: int = 0
    """Position of the first token that is in the cache."""


@dataclass(frozen=True, slots=True)
class PackedInput:
    """The inputs of a step, one behind the other."""

    token_ids: Tensor
    """``[1, T]``, as the positions."""
    positions: Tensor
    logit_rows: Tensor
    """Indices into T."""
    context: PagedContext


def pack(inputs: Sequence[SequenceInput], cache: KVCache, kernels: CpuKernels | None) -> PackedInput:
    """Lays out what the sequences feed, and where in the cache it goes."""
    device, block_size = cache.keys.device, cache.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[SequenceSpan] = []
    for item in inputs:
        first, count = len(token_ids), len(item.token_ids)
        span = range(item.start, item.start + count)
        token_ids.extend(item.token_ids)
        positions.extend(span)
        slots.extend(item.block_table[p // block_size] * block_size + p % block_size for p in span)
        logit_rows.extend(range(first + count - item.num_logits, first + count))
        spans.append(SequenceSpan(first, count, item.start + count, item.block_table, item.first_key))
    return PackedInput(
        token_ids=torch.tensor([token_ids], device=device),
        positions=torch.tensor([positions], device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.long, device=device),
        context=build_context(cache, torch.tensor(slots, device=device), spans, kernels=kernels),
    )


class Runner(Protocol):
    """A model with a cache of its own, whatever else it reads."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """Fills the cache; float32 logits ``[sum of num_logits, vocab]``."""

    def clear(self, block_ids: Sequence[int]) -> None:
        """Clears blocks of the cache that have new owners."""

    def synchronize(self) -> None:
        """Waits until the device has finished; for timing."""


class ModelRunner:
    """A model with its cache. Target and draft each have one."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, *, vocab_size: int) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys.device
        self.vocab_size = vocab_size
        self._kernels = usable_kernels(cache, num_heads=model.config.get_text_config().num_attention_heads)

    @torch.inference_mode()
    def forward(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """Computes all inputs in one packed forward and fills the cache.

        Returns float32 logits ``[sum of num_logits, vocab]``, in the order of the inputs.
        """
        packed = pack(inputs, self.cache, self._kernels)
        output = self.model(
            input_ids=packed.token_ids,
            position_ids=packed.positions,
            use_cache=False,
            logits_to_keep=packed.logit_rows,
            paged=packed.context,
        )
        return cast(Tensor, output.logits[0]).float()

    def clear(self, block_ids: Sequence[int]) -> None:
        """Clears blocks of the cache that have new owners."""
        self.cache.clear(block_ids)

    def synchronize(self) -> None:
        """Waits until the device has finished; for timing."""
        wait_for(self.device)


def wait_for(device: torch.device) -> None:
    """Waits until all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
