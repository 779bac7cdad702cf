"""The tensors that hold keys and values, in blocks. Who owns which block is `core.block_pool`'s matter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """One pool of keys and one of values for each layer of one model.

    `keys[layer]` and `values[layer]` are ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        # Zeros, not garbage: a masked position still takes part in products, and 0 * NaN is NaN.
        # On a CPU zeroed pages cost nothing until they are written.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        return self.keys.shape[1] * self.block_size

    @torch.inference_mode()
    def clear(self, block_ids: Sequence[int]) -> None:
        """Makes blocks what they were at first: whoever had them last may have left NaN there."""
        if block_ids:
            index = torch.tensor(block_ids, device=self.keys.device)
            for pool in (self.keys, self.values):
                pool.index_fill_(1, index, 0.0)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores ``[tokens, num_kv_heads, head_dim]`` at slots ``[tokens]`` (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks ``[batch, blocks]`` as ``[batch, num_kv_heads, tokens, head_dim]``."""
        batch = block_ids.shape[0]
        flat = block_ids.flatten()
        gathered = (pool[layer].index_select(0, flat) for pool in (self.keys, self.values))
        keys, values = (t.reshape(batch, -1, *t.shape[2:]).transpose(1, 2) for t in gathered)
        return keys, values
