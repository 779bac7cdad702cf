"""Runs a draft head on packed tokens, over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from draftline_server.model.attention import usable_kernels
from draftline_server.model.draft_head import DraftHead
from draftline_server.model.kv_cache import KVCache
from draftline_server.model.runner import SequenceInput, pack, wait_for


class HeadRunner:
    """A head with its cache."""

    def __init__(
        self, head: DraftHead, cache: KVCache, *, vocab_size: int, draft_token_ids: Tensor | None
    ) -> None:
        self.cache = cache
        self.device = cache.keys.device
        self.vocab_size = vocab_size
        """Of the target."""
        self._head = head
        self._columns = None if draft_token_ids is None else self._columns_of(draft_token_ids)
        self._kernels = usable_kernels(cache, num_heads=head.config.layer.num_attention_heads)

    @torch.inference_mode()
    def fuse(self, captured: Tensor) -> Tensor:
        """What the target left for each token, ``[tokens, captured size]``, as vectors ``[tokens, size]``."""
        return self._head.fuse(captured.to(self.cache.keys.dtype))

    @torch.inference_mode()
    def draft(self, inputs: Sequence[SequenceInput], vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Computes all inputs in one packed forward and fills the cache.

        `vectors` ``[tokens, size]`` belong to the token before each of those fed. Returns, for the rows that
        logits are wanted of, float32 logits ``[rows, vocab]`` and vectors ``[rows, size]`` to go on with.
        Tokens outside of the draft vocabulary have a logit of -inf.
        """
        packed = pack(inputs, self.cache, self._kernels)
        output = self._head(packed.token_ids, vectors[None], packed.positions, paged=packed.context)
        last = output[0, packed.logit_rows]
        if not last.shape[0]:
            return last.new_empty(0, self.vocab_size), last
        return self._spread(self._head.logits(last).float()), last

    def forward(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """As `draft`, after vectors of zeros: to see what it costs, and whether the weights are sound."""
        num_tokens = sum(len(item.token_ids) for item in inputs)
        dtype, size = self.cache.keys.dtype, self._head.config.layer.hidden_size
        logits, _ = self.draft(inputs, torch.zeros(num_tokens, size, dtype=dtype, device=self.device))
        return logits

    def clear(self, block_ids: Sequence[int]) -> None:
        """Clears blocks of the cache that have new owners."""
        self.cache.clear(block_ids)

    def synchronize(self) -> None:
        """Waits until the device has finished; for timing."""
        wait_for(self.device)

    def _columns_of(self, draft_token_ids: Tensor) -> Tensor:
        """For each token of the target's vocabulary its column in the draft's, or one behind the last."""
        count = draft_token_ids.shape[0]
        columns = torch.full((self.vocab_size,), count, dtype=torch.int32, device=self.device)
        columns[draft_token_ids.to(self.device)] = torch.arange(count, dtype=torch.int32, device=self.device)
        return columns

    def _spread(self, logits: Tensor) -> Tensor:
        if self._columns is None:
            return logits
        # Gathered, which takes half as long as to scatter.
        return functional.pad(logits, (0, 1), value=float("-inf")).index_select(1, self._columns)
