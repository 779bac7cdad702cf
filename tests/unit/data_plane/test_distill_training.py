"""Which weights a training ends with."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftline_server.distill import new_head
from draftline_server.distill.batches import Batch
from draftline_server.distill.dialogues import Dialogue
from draftline_server.distill.training import Trainer, TrainingSettings
from support.prompts import random_prompt
from support.tiny_models import make_tiny_model

LAYER_IDS = (0, 1, 2)
DRAFT_VOCAB_SIZE = 8
CPU = torch.device("cpu")


def make_trainer(target: Path) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(target)
    config = new_head.make_head_config(
        model, layer_ids=LAYER_IDS, draft_vocab_size=DRAFT_VOCAB_SIZE, max_length=64
    )
    head = new_head.make_head(model, config, torch.arange(DRAFT_VOCAB_SIZE), seed=0, device=CPU)
    settings = TrainingSettings(steps=1, unrolled_steps=2)
    return Trainer(head, new_head.make_teacher(model), settings, device=CPU, compute_dtype=torch.float32)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.head.state_dict().items()}


def test_the_weights_that_guess_best_on_texts_held_out_stay_also_through_a_checkpoint(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target", layers=2)
    trainer = make_trainer(target)
    generator = torch.Generator().manual_seed(1)
    texts = [Dialogue(tuple(random_prompt(40, seed=seed)), 4) for seed in range(6)]
    size = trainer.head.config.captured_size
    batches = [
        Batch.of(pair, [torch.randn(40, size, generator=generator) for _ in pair])
        for pair in (texts[:3], texts[3:])
    ]
    scored: list[tuple[list[float], dict[str, Tensor]]] = []
    for step in range(5):
        trainer.progress.step = step
        with torch.no_grad():
            for matrix in (p for p in trainer.head.parameters() if p.requires_grad and p.dim() == 2):
                matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.1)
        scored.append((trainer.score(batches), state_of(trainer)))
    trainer.save(tmp_path / "training.pt")
    again = make_trainer(target)
    again.load(tmp_path / "training.pt")
    assert_equal(state_of(again), scored[-1][1])  # from where training would go on

    best = max(range(5), key=lambda step: scored[step][0][0] * (1 + scored[step][0][1]))
    assert best != 4, "the last ones are not the best here, or nothing is shown"
    for one in (trainer, again):
        one.take_best()
        assert_equal(state_of(one), scored[best][1])
        assert (one.progress.best_step, one.progress.held_out) == (best, scored[best][0])


def assert_equal(states: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert states.keys() == expected.keys()
    assert all(torch.equal(states[name], expected[name]) for name in states)
