"""Random numbers that depend on nothing but (seed, position, stream, token id).

There is no generator state, so a request's noise is the same in any batch, at any draft length and
after a preemption; that is what makes seeded output independent of speculation. Integer operations
only until the last step, so that every device computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


class Stream(IntEnum):
    """Independent families of noise; what is drawn from one says nothing about the others."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


def noise_key(seed: int, position: int, stream: Stream) -> int:
    """64 well-mixed bits for the token at `position` (its index in the sequence)."""
    key = _mix_64(seed & _MASK_64)
    key = _mix_64(key ^ (position * 4 + stream))
    return key


def exponential_noise(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Standard exponential variates ``[len(keys), vocab_size]``, float32, one row for each key.

    The token that minimises noise / p is distributed as p (an exponential race).
    """
    low = torch.tensor([k & _MASK_32 for k in keys], device=device).unsqueeze(1)
    high = torch.tensor([k >> 32 for k in keys], device=device).unsqueeze(1)
    bits = _mix_32(_mixed_ids(vocab_size, device) ^ low).add_(high).bitwise_and_(_MASK_32)
    # (bits + 1/2) / 2**32 lies in (0, 1). Small values keep their relative precision in float32,
    # and small noise is what decides.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_()


def uniform_noise(key: int) -> float:
    """One uniform variate in (0, 1)."""
    return ((key >> 11) + 0.5) * 2.0**-53


@lru_cache(maxsize=8)
def _mixed_ids(vocab_size: int, device: torch.device) -> Tensor:
    return _mix_32(torch.arange(vocab_size, device=device).unsqueeze(0))


def _mix_32(x: Tensor) -> Tensor:
    """Chris Wellons' "lowbias32" hash of the low 32 bits of an int64 tensor, in place: rows are long."""
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK_32)
    x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(_MASK_32)
    return x.bitwise_xor_(x >> 16)


def _mix_64(x: int) -> int:
    """One step of Sebastiano Vigna's splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x >> 30) ^ x) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = ((x >> 27) ^ x) * 0x94D049BB133111EB & _MASK_64
    return (x >> 31) ^ x
