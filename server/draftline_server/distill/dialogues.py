"""Texts that a head learns from: prompts and the target's own answers, in one file.

The file is a NumPy archive: ``tokens``, all texts one behind the other, and ``lens`` ``[texts, 2]``, tokens
of each prompt and answer.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftline_server.errors import ModelError


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One text."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.token_ids[: self.num_prompt_tokens]

    def cut(self, max_tokens: int) -> Dialogue:
        """Its first tokens; without an answer where the prompt alone has more."""
        return Dialogue(self.token_ids[:max_tokens], min(self.num_prompt_tokens, max_tokens))


def write_dialogues(path: Path, dialogues: Sequence[Dialogue]) -> None:
    """Writes the file whole or not at all. Raises `OSError`."""
    tokens = np.array([token for d in dialogues for token in d.token_ids], dtype=np.uint32)
    lengths = np.array([(d.num_prompt_tokens, d.num_answer_tokens) for d in dialogues], dtype=np.int64)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, tokens=tokens, lens=lengths.reshape(-1, 2))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_dialogues(path: Path, *, vocab_size: int) -> list[Dialogue]:
    """Reads and checks a file. Raises `ModelError`."""
    try:
        # Opened here: what is no archive would otherwise be left open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            tokens, lengths = archive["tokens"].astype(np.int64), archive["lens"].astype(np.int64)
    except FileNotFoundError:
        raise ModelError(f"{path}: missing") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path}: not a file of dialogues: {error}") from error
    if lengths.ndim != 2 or lengths.shape[1:] != (2,) or lengths.sum() != len(tokens) or (lengths < 0).any():
        raise ModelError(f"{path}: its lengths (lens) do not fit its {tokens.size} tokens")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ModelError(f"{path}: has tokens that are not in the target's vocabulary of {vocab_size}")
    ends = lengths.sum(axis=1).cumsum()
    starts = ends - lengths.sum(axis=1)
    return [
        Dialogue(tuple(tokens[start:end].tolist()), int(num_prompt_tokens))
        for start, end, (num_prompt_tokens, _) in zip(starts, ends, lengths, strict=True)
    ]
