"""Picks a token from each processed row: the most probable one, or one drawn with keyed noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftline_server.model import cpu_kernels
from draftline_server.model.noise import exponential_noise

MAX_NOISE = 2**21
"""Numbers that are drawn at once; while they are made, each takes 20 bytes."""


def sample(logits: Tensor, keys: Sequence[int | None]) -> list[int]:
    """Samples each row of processed logits ``[rows, vocab]``; a key of None takes the argmax."""
    drawn = [i for i, key in enumerate(keys) if key is not None]
    if not drawn:
        return argmax(logits)
    noise_keys = [key for key in keys if key is not None]
    index = torch.tensor(drawn, device=logits.device)
    probs = torch.softmax(logits[index] if len(drawn) < len(keys) else logits, dim=-1)
    sampled = sample_probs(probs, noise_keys)
    if len(drawn) == len(keys):
        return sampled
    tokens = argmax(logits)
    for row, token_id in zip(drawn, sampled, strict=True):
        tokens[row] = token_id
    return tokens


def argmax(logits: Tensor) -> list[int]:
    """The token of the highest logit of each row ``[rows, vocab]``; of equals the first."""
    kernels = cpu_kernels.load() if logits.device.type == "cpu" else None
    if kernels is not None and logits.dtype == torch.float32 and logits.is_contiguous():
        return kernels.argmax(logits).tolist()
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens


def sample_probs(probs: Tensor, keys: Sequence[int]) -> list[int]:
    """Samples each row of (possibly unnormalised) probabilities ``[rows, vocab]``."""
    num_rows = max(1, MAX_NOISE // probs.shape[-1])
    drawn: list[Tensor] = []
    for start in range(0, len(keys), num_rows):
        rows = slice(start, start + num_rows)
        noise = exponential_noise(keys[rows], probs.shape[-1], probs.device)
        drawn.append(torch.div(probs[rows], noise, out=noise).argmax(dim=-1))
    return torch.cat(drawn).tolist()
