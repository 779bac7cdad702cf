"""In which order a head sees the dialogues: a function of seed and step, so that nothing needs saving."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftline_server.distill.dialogues import Dialogue
from draftline_server.distill.features import FeatureReader

# Dialogues of similar length go together, found among so many batches' worth of them.
SORTED_BATCHES = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts padded on the right."""

    token_ids: Tensor
    """``[texts, tokens]``."""
    captured: Tensor
    """``[texts, tokens, captured size]``."""
    is_learned: Tensor
    """Whether the token after this one is part of an answer, ``[texts, tokens]``."""

    @classmethod
    def of(cls, dialogues: Sequence[Dialogue], captured: Sequence[Tensor]) -> Self:
        token_ids = [torch.tensor(d.token_ids) for d in dialogues]
        learned = [
            torch.arange(len(d.token_ids)).add(1).ge(d.num_prompt_tokens)
            & torch.arange(len(d.token_ids)).add(1).lt(len(d.token_ids))
            for d in dialogues
        ]
        return cls(
            pad_sequence(token_ids, batch_first=True),
            pad_sequence(list(captured), batch_first=True),
            pad_sequence(learned, batch_first=True),
        )

    def to(self, device: torch.device) -> Batch:
        return Batch(self.token_ids.to(device), self.captured.to(device), self.is_learned.to(device))


class BatchOrder:
    """Indices of the dialogues of each step."""

    def __init__(self, lengths: Sequence[int], *, batch_size: int, seed: int) -> None:
        self._lengths = lengths
        self._batch_size = min(batch_size, len(lengths))
        self._seed = seed
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        return len(self._lengths) // self._batch_size

    def batch(self, step: int) -> list[int]:
        """The dialogues of a step; each comes once in an epoch, but for what is left over."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffle(epoch))
        return self._epoch[1][place]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        source = random.Random(f"{self._seed}/{epoch}")
        indices = list(range(len(self._lengths)))
        source.shuffle(indices)
        indices = indices[: self.steps_per_epoch * self._batch_size]
        batches: list[list[int]] = []
        window = SORTED_BATCHES * self._batch_size
        for start in range(0, len(indices), window):
            batches += in_batches(indices[start : start + window], self._lengths, self._batch_size)
        source.shuffle(batches)
        return batches


def in_batches(indices: Sequence[int], lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Those of similar length together."""
    alike = sorted(indices, key=lambda index: lengths[index])
    return [alike[start : start + batch_size] for start in range(0, len(alike), batch_size)]


def read_batch(indices: Sequence[int], dialogues: Sequence[Dialogue], features: FeatureReader) -> Batch:
    return Batch.of([dialogues[i] for i in indices], [features.read(i) for i in indices])
