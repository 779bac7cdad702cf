"""What the target computes for each token of the dialogues, on disk: a head is trained without its target.

Dialogues are taken in parts, one file each, written whole or not at all; a part that is there is not computed
again. Numbers are bfloat16: what a head reads is noisy by far more.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftline_server.distill.dialogues import Dialogue
from draftline_server.errors import ModelError
from draftline_server.model.hidden_states import HiddenStateTap
from draftline_server.model.runner import ModelRunner, SequenceInput

DIALOGUES_PER_PART = 64
MAX_FORWARD_TOKENS = 2048

_KEY = "captured"


@dataclass(frozen=True, slots=True)
class FeatureFiles:
    """The files of some dialogues."""

    directory: Path
    dialogues: Sequence[Dialogue]

    def parts(self) -> list[tuple[Path, Sequence[Dialogue]]]:
        starts = range(0, len(self.dialogues), DIALOGUES_PER_PART)
        return [
            (
                self.directory / f"part-{number:05}.safetensors",
                self.dialogues[start : start + DIALOGUES_PER_PART],
            )
            for number, start in enumerate(starts)
        ]

    def missing(self) -> list[tuple[Path, Sequence[Dialogue]]]:
        return [(path, dialogues) for path, dialogues in self.parts() if not path.exists()]


def compute_features(
    files: FeatureFiles, target: ModelRunner, tap: HiddenStateTap, advance: Callable[[int], object]
) -> None:
    """Writes the missing parts; `advance` is told of tokens done. Raises `OSError`."""
    files.directory.mkdir(parents=True, exist_ok=True)
    for path, dialogues in files.missing():
        captured = [rows for batch in _batches(dialogues) for rows in _forward(batch, target, tap)]
        save_whole({_KEY: torch.cat(captured)}, path)
        advance(sum(len(d.token_ids) for d in dialogues))


def save_whole(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a file whole or not at all. Raises `OSError`, also where the library has errors of its own."""
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(partial)) from error


def _batches(dialogues: Sequence[Dialogue]) -> Iterator[list[Dialogue]]:
    batch: list[Dialogue] = []
    for dialogue in dialogues:
        if batch and sum(len(d.token_ids) for d in (*batch, dialogue)) > MAX_FORWARD_TOKENS:
            yield batch
            batch = []
        batch.append(dialogue)
    if batch:
        yield batch


def _forward(batch: Sequence[Dialogue], target: ModelRunner, tap: HiddenStateTap) -> list[Tensor]:
    block_size = target.cache.block_size
    inputs: list[SequenceInput] = []
    first = 0
    for dialogue in batch:
        num_blocks = -(-len(dialogue.token_ids) // block_size)
        table = range(first, first + num_blocks)
        inputs.append(SequenceInput(dialogue.token_ids, start=0, block_table=table, num_logits=0))
        first += num_blocks
    with torch.inference_mode(), tap.taking():
        target.forward(inputs)
    rows = tap.hidden_states().to(device="cpu", dtype=torch.bfloat16)
    return list(torch.split(rows, [len(d.token_ids) for d in batch]))


def _open(path: Path) -> Any:
    try:
        file: Any = safe_open(path, framework="pt")
        return file.get_slice(_KEY)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: damaged; delete it to have it computed again: {error}") from error


class FeatureReader:
    """Reads what was computed for single dialogues."""

    def __init__(self, files: FeatureFiles) -> None:
        """Raises `ModelError` where a file is damaged or of other dialogues."""
        self._parts = [_open(path) for path, _ in files.parts()]
        self._ends = [
            list(itertools.accumulate(len(d.token_ids) for d in dialogues)) for _, dialogues in files.parts()
        ]
        for (path, _), part, ends in zip(files.parts(), self._parts, self._ends, strict=True):
            if part.get_shape()[0] != ends[-1]:
                raise ModelError(f"{path}: has {part.get_shape()[0]} tokens, not {ends[-1]}; delete it")

    def read(self, index: int) -> Tensor:
        """``[tokens, captured size]`` of a dialogue, bfloat16."""
        part, place = divmod(index, DIALOGUES_PER_PART)
        ends = self._ends[part]
        rows: Tensor = self._parts[part][ends[place - 1] if place else 0 : ends[place]]
        return rows
