"""Runs one model on packed tokens: builds the inputs, calls it once, returns the logits asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline_server.model.attention import SequenceSpan, build_context, usable_kernels
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
        block_size = self.cache.block_size
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
            spans.append(SequenceSpan(first, count, item.start + count, item.block_table))
        context = build_context(
            self.cache, torch.tensor(slots, device=self.device), spans, kernels=self._kernels
        )
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(logit_rows, dtype=torch.long, device=self.device),
            paged=context,
        )
        return cast(Tensor, output.logits[0]).float()

    def synchronize(self) -> None:
        """Waits until the device has finished; for timing."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
