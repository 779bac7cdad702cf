"""Trains a head with unrolled steps, resumably.

The matrices are trained by Muon, the norms by AdamW. The rate falls as the share of the budget that is used
up rises, be it of steps (then a run that was interrupted ends with the very same weights) or of minutes.
After each pass over the texts the head is scored on texts held out; the best weights are those that stay,
since a head that sees its texts too often learns them by heart.
"""

from __future__ import annotations

import io
import itertools
import math
import operator
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftline_server.core.clock import Clock
from draftline_server.distill.batches import Batch, BatchOrder, in_batches, read_batch
from draftline_server.distill.dialogues import Dialogue
from draftline_server.distill.features import FeatureReader
from draftline_server.distill.losses import StepOutcome, compare
from draftline_server.distill.unrolled import unroll
from draftline_server.errors import ModelError
from draftline_server.model.draft_head import DraftHead

_WARM_UP = 0.02
_LEAST_RATE = 0.02
_MAY_CHANGE = {"steps", "minutes", "checkpoint_seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """All that decides what a run ends with, besides data and first weights."""

    steps: int | None = None
    minutes: float | None = None
    """One of both is the budget."""
    unrolled_steps: int = 4
    batch_size: int = 8
    matrix_rate: float = 5e-3
    norm_rate: float = 5e-4
    state_weight: float = 1.0
    """Of the distance to the target's own state, beside the cross-entropy."""
    step_decay: float = 0.9
    """Weight of an unrolled step over that before it."""
    kept_rows: float = 0.25
    """Share of the rows that go on after the first unrolled step, drawn anew for each batch."""
    seed: int = 0
    checkpoint_seconds: float = 60.0

    def recipe(self) -> dict[str, Any]:
        """All but the budget, which may be raised, and how often a checkpoint is written."""
        return {key: value for key, value in asdict(self).items() if key not in _MAY_CHANGE}


@dataclass(slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0
    """Spent on steps, in all runs together."""
    num_tokens: int = 0
    acceptance: list[float] = field(default_factory=list)
    """Share of right guesses by unrolled step, of late."""
    loss: float = math.nan
    held_out: list[float] = field(default_factory=list)
    """Share of right guesses by unrolled step, of the best weights so far, on texts held out."""
    best_step: int = 0
    """When they were the head's."""

    def share(self, settings: TrainingSettings) -> float:
        """Of the budget that is used up."""
        if settings.steps is not None:
            return self.step / settings.steps
        assert settings.minutes is not None, "a budget is given"
        return self.seconds / (60 * settings.minutes)


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target adds to its hidden states."""

    norm_scale: Tensor
    """Of its last norm, ``[hidden size]``."""
    epsilon: float
    softcap: float | None

    def to(self, device: torch.device) -> Teacher:
        return Teacher(self.norm_scale.to(device), self.epsilon, self.softcap)

    def final_states(self, captured: Tensor) -> Tensor:
        """The normed final states, of captured ones whose last part is the last layer's output."""
        raw = captured[..., -self.norm_scale.shape[0] :].float()
        return raw * torch.rsqrt(raw.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.norm_scale


class Trainer:
    """One run. The head holds float32 weights; products are of `compute_dtype`."""

    def __init__(
        self,
        head: DraftHead,
        teacher: Teacher,
        settings: TrainingSettings,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> None:
        self.head = head
        self.progress = Progress()
        self._teacher = teacher
        self._settings = settings
        self._device = device
        self._compute_dtype = compute_dtype
        trained = [p for p in head.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2]
        norms = [p for p in trained if p.dim() != 2]
        self._best: dict[str, Tensor] = {}
        self._rates = (settings.matrix_rate, settings.norm_rate)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices, lr=settings.matrix_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(norms, lr=settings.norm_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, batch: Batch) -> None:
        """Learns from one batch."""
        self._set_rates()
        loss, outcome = self._loss(batch, of=str(self.progress.step))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_([p for p in self.head.parameters() if p.requires_grad], 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        self.progress.num_tokens += int(batch.is_learned.sum())
        self._note(float(loss.detach()), outcome)

    @torch.no_grad()
    def score(self, batches: Iterable[Batch]) -> list[float]:
        """Share of right guesses by unrolled step; the weights are kept if none were better."""
        outcomes = [self._loss(batch, of="held out")[1] for batch in batches]
        shares = _acceptance(
            torch.cat([outcome.correct for outcome in outcomes], dim=-1),
            torch.cat([outcome.valid for outcome in outcomes], dim=-1),
        )
        if not self._best or _draft_tokens(shares) > _draft_tokens(self.progress.held_out):
            self._best = {name: value.clone() for name, value in self.head.state_dict().items()}
            self.progress.held_out, self.progress.best_step = shares, self.progress.step
        return shares

    def take_best(self) -> None:
        """Gives the head the best weights that were scored."""
        self.head.load_state_dict(self._best)

    def _draw_rows(self, is_learned: Tensor, *, of: str) -> Tensor:
        """Those that draft more than one token, of each text as many; a function of the seed and `of`."""
        source = random.Random(f"{self._settings.seed}/rows/{of}")
        generator = torch.Generator().manual_seed(source.getrandbits(63))
        says_something = is_learned[:, 1:]
        count = max(1, math.ceil(self._settings.kept_rows * int(says_something.sum(dim=-1).max())))
        drawn = torch.rand(says_something.shape, generator=generator) * says_something
        return drawn.topk(count, dim=-1).indices

    def _loss(self, batch: Batch, *, of: str) -> tuple[Tensor, StepOutcome]:
        rows = self._draw_rows(batch.is_learned, of=of).to(self._device)
        batch = batch.to(self._device)
        num_steps = self._settings.unrolled_steps
        target = self._teacher.final_states(batch.captured)
        learned = batch.is_learned
        length = learned.shape[1]
        with torch.autocast(self._device.type, self._compute_dtype, self._compute_dtype != torch.float32):
            captured = batch.captured.to(self._compute_dtype)
            steps = unroll(self.head, batch.token_ids, captured, num_steps, rows=rows)
            # Row r of step t guesses what follows token r + 1 + t.
            placed = [_place(vectors, of + 1 + t, length) for t, (vectors, of) in enumerate(steps)]
        guesses = [vectors[learned] for vectors, _ in placed]
        valid = torch.stack([is_there[learned] for _, is_there in placed])
        stacked, expected = torch.stack(guesses), target[learned]
        outcome = compare(
            stacked,
            expected,
            self.head.lm_head.weight,
            valid,
            softcap=self._teacher.softcap,
            compute_dtype=self._compute_dtype,
        )
        scale = expected.pow(2).mean().sqrt()
        distance = functional.smooth_l1_loss(
            stacked.float() / scale, (expected / scale).expand_as(stacked), reduction="none"
        ).mean(dim=-1)
        distances = (distance * valid).sum(dim=-1) / valid.sum(dim=-1).clamp(min=1)
        weights = self._settings.step_decay ** torch.arange(num_steps, device=self._device)
        losses = outcome.loss + self._settings.state_weight * distances
        return (losses * weights).sum() / weights.sum(), outcome

    def _set_rates(self) -> None:
        share = min(1.0, self.progress.share(self._settings))
        falling = _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        factor = min(1.0, max(share, 0.01 * _WARM_UP) / _WARM_UP) * falling
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor

    def _note(self, loss: float, outcome: StepOutcome) -> None:
        seen = _acceptance(outcome.correct, outcome.valid)
        known = self.progress.acceptance or seen
        self.progress.acceptance = [0.95 * old + 0.05 * new for old, new in zip(known, seen, strict=True)]
        before = self.progress.loss
        self.progress.loss = loss if math.isnan(before) else 0.95 * before + 0.05 * loss

    def save(self, path: Path) -> None:
        """Writes everything that a run goes on from, whole or not at all. Raises `OSError`."""
        state = {
            "head": self.head.state_dict(),
            "best": self._best,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": asdict(self.progress),
            "recipe": self._recipe(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)  # not into the file: on a full disk it raises an error of its own
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Goes on from a file of `save`. Raises `ModelError` for one that is damaged or of another recipe."""
        try:
            state: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
            self._check_recipe(path, state["recipe"])
            self.head.load_state_dict(state["head"])
            for optimizer, own in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(own)
            self._best = state["best"]
            self.progress = Progress(**state["progress"])
        except ModelError:
            raise
        except Exception as error:  # torch raises anything for a file that is not its own
            reason = " ".join(str(error).split())
            raise ModelError(f"{path}: damaged; delete it to train anew: {reason}") from error

    def _recipe(self) -> dict[str, Any]:
        return self._settings.recipe() | {"draft_vocab_size": self.head.config.draft_vocab_size}

    def _check_recipe(self, path: Path, before: dict[str, Any]) -> None:
        for key, value in self._recipe().items():
            if before.get(key) != value:
                raise ModelError(
                    f"{path}: was begun with {key} {before.get(key)}, not {value}; delete it to train anew"
                )


def _place(vectors: Tensor, places: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Vectors ``[batch, rows, size]`` at their `places` in ``[batch, length, size]``; and where one is."""
    batch, _, size = vectors.shape
    end = max(length, int(places.max()) + 1)
    spread = vectors.new_zeros(batch, end, size).scatter(1, places[..., None].expand(-1, -1, size), vectors)
    is_there = torch.zeros(batch, end, dtype=torch.bool, device=places.device).scatter(1, places, True)
    return spread[:, :length], is_there[:, :length]


def _acceptance(correct: Tensor, valid: Tensor) -> list[float]:
    right = correct.sum(dim=-1) / valid.sum(dim=-1).clamp(min=1)
    shares: list[float] = right.tolist()
    return shares


def _draft_tokens(shares: Sequence[float]) -> float:
    """How many tokens of a draft would stand, one behind the other."""
    return sum(itertools.accumulate(shares, operator.mul), start=0.0)


def train(
    trainer: Trainer,
    settings: TrainingSettings,
    dialogues: Sequence[Dialogue],
    features: FeatureReader,
    checkpoint: Path,
    *,
    num_held_out: int,
    report: Callable[[Progress], object],
    clock: Clock = time.monotonic,
) -> None:
    """Trains until the budget is used up, from the checkpoint on if there is one; leaves the best weights.

    The last `num_held_out` of the dialogues are not learned from: they tell which weights are best.
    """
    if checkpoint.exists():
        trainer.load(checkpoint)
    num_learned = len(dialogues) - num_held_out
    lengths = [len(d.token_ids) for d in dialogues]
    order = BatchOrder(lengths[:num_learned], batch_size=settings.batch_size, seed=settings.seed)
    held_out = in_batches(range(num_learned, len(dialogues)), lengths, settings.batch_size)
    saved_at = clock()
    while trainer.progress.share(settings) < 1.0:
        started = clock()
        trainer.step(read_batch(order.batch(trainer.progress.step), dialogues, features))
        trainer.progress.seconds += clock() - started
        is_last = trainer.progress.share(settings) >= 1.0
        if is_last or trainer.progress.step % order.steps_per_epoch == 0:
            trainer.score(read_batch(indices, dialogues, features) for indices in held_out)
        report(trainer.progress)
        if is_last or clock() - saved_at >= settings.checkpoint_seconds:
            trainer.save(checkpoint)
            saved_at = clock()
    if not trainer.progress.held_out:  # the budget was lowered to less than is used up
        trainer.score(read_batch(indices, dialogues, features) for indices in held_out)
    trainer.take_best()
