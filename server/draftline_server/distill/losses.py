"""How far a head's guesses are from what the target says, without ever holding all logits at once.

For each position the target's distribution over the draft vocabulary is computed once and compared with
those of all unrolled steps that guess it. The output layer is frozen, so the gradient of a chunk is known as
soon as its logits are; only gradients of the vectors are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

CHUNK_ROWS = 256
"""Positions whose logits are held at once: few enough for the caches of a CPU."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Of all steps, ``[steps]``."""

    loss: Tensor
    """Mean cross-entropy against the target's distribution; has a gradient."""
    correct: Tensor
    """Whether the most probable token is the target's, ``[steps, positions]``; False where not `valid`."""
    valid: Tensor
    """Whether a step guesses a position, ``[steps, positions]``."""


def compare(
    guesses: Tensor,
    target: Tensor,
    output: Tensor,
    valid: Tensor,
    *,
    softcap: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> StepOutcome:
    """Compares normed vectors ``guesses [steps, positions, size]`` with the target's ``[positions, size]``.

    `output` ``[draft vocabulary, size]`` is the output layer of both. `softcap` is the target's own.
    """
    losses, correct = cast(Any, _Compare).apply(guesses, target, output, valid, softcap, compute_dtype)
    return StepOutcome(losses, correct, valid)


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        guesses: Tensor,
        target: Tensor,
        output: Tensor,
        valid: Tensor,
        softcap: float | None,
        compute_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        weight = output.to(compute_dtype)
        num_steps, num_positions, _ = guesses.shape
        losses = guesses.new_zeros(num_steps, dtype=torch.float32)
        correct = torch.zeros_like(valid)
        gradient = torch.zeros_like(guesses)
        for start in range(0, num_positions, CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            expected = (target[rows].to(compute_dtype) @ weight.T).float()
            if softcap is not None:
                expected = softcap * torch.tanh(expected / softcap)
            best = expected.argmax(dim=-1)
            probs = torch.softmax(expected, dim=-1)
            for step in range(num_steps):
                said = start + valid[step, rows].nonzero().squeeze(-1)
                logits = (guesses[step, said].to(compute_dtype) @ weight.T).float()
                correct[step, said] = logits.argmax(dim=-1) == best[said - start]
                its = probs if len(said) == len(probs) else probs[said - start]
                total = torch.logsumexp(logits, dim=-1, keepdim=True)
                losses[step] += total.sum() - torch.dot(its.flatten(), logits.flatten())
                difference = logits.sub_(total).exp_().sub_(its)
                gradient[step, said] = (difference.to(compute_dtype) @ weight).to(gradient.dtype)
        counts = valid.sum(dim=-1).clamp(min=1)
        gradient /= counts[:, None, None]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return losses / counts, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return cast(Tensor, gradient) * gradients[0][:, None, None], None, None, None, None, None
