"""What a head is trained on is what it does when it drafts, and its loss is the one of the whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from draftline_server.distill import losses, unrolled
from draftline_server.distill.losses import compare
from support.draft_heads import ReferenceHead, load_unrolled_head, make_tiny_head
from support.prompts import random_prompt
from support.tiny_models import make_tiny_model

STEPS = 3


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("norm_output", [False, True])
def test_unrolled_steps_are_drafts_from_every_token_at_once(
    tmp_path: Path, layers: int, norm_output: bool
) -> None:
    target = make_tiny_model(tmp_path / "target")
    directory = make_tiny_head(
        tmp_path / "head", target, layers=layers, norm_output=norm_output, fc_norm=True
    )
    reference = ReferenceHead(directory, target)
    head = load_unrolled_head(directory, target)
    tokens = random_prompt(12, seed=5)
    captured = reference.captured(tokens)

    steps = [of for of, _ in unrolled.unroll(head, torch.tensor([tokens]), captured[None], STEPS)]

    fused = reference.fuse(captured)
    num_rows = len(tokens) - 1
    for row in range(num_rows - STEPS + 1):
        fed, vectors = list(tokens[1 : row + 2]), fused[: row + 1]
        for step in range(STEPS):
            outputs = reference._forward(fed, vectors, first_position=1)
            torch.testing.assert_close(steps[step][0, row], outputs[-1], rtol=1e-4, atol=1e-4)
            fed.append(tokens[row + 2 + step] if row + 2 + step < len(tokens) else 0)
            vectors = torch.cat([vectors, outputs[-1:]])

    kept = torch.tensor([[7, 2, 4]])
    some = list(unrolled.unroll(head, torch.tensor([tokens]), captured[None], STEPS, rows=kept))
    torch.testing.assert_close(some[0][0], steps[0])
    for step in range(1, STEPS):
        assert some[step][1].tolist() == kept.tolist()
        torch.testing.assert_close(some[step][0][0], steps[step][0, kept[0]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_loss_and_gradient_are_those_of_the_whole_logits(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 7)
    generator = torch.Generator().manual_seed(1)
    guesses = torch.randn(STEPS, 20, 8, generator=generator).requires_grad_()
    target = torch.randn(20, 8, generator=generator)
    output = torch.randn(30, 8, generator=generator)
    valid = torch.rand(STEPS, 20, generator=generator) < 0.7

    outcome = compare(guesses, target, output, valid, softcap=softcap)
    torch.autograd.backward((outcome.loss * torch.tensor([1.0, 0.5, 0.2])).sum())

    own = guesses.detach().clone().requires_grad_()
    expected = target @ output.T
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    logits = own @ output.T
    crossed = -(torch.softmax(expected, -1) * functional.log_softmax(logits, -1)).sum(-1)
    loss = (crossed * valid).sum(-1) / valid.sum(-1)
    torch.autograd.backward((loss * torch.tensor([1.0, 0.5, 0.2])).sum())
    assert guesses.grad is not None
    assert own.grad is not None
    torch.testing.assert_close(outcome.loss, loss)
    torch.testing.assert_close(guesses.grad, own.grad)
    torch.testing.assert_close(outcome.correct, (logits.argmax(-1) == expected.argmax(-1)) & valid)
