"""Which tokens a head may propose: the most frequent ones of the target's answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftline_server.distill.dialogues import Dialogue


def choose_draft_vocabulary(dialogues: Sequence[Dialogue], *, vocab_size: int, size: int) -> list[int]:
    """Ids in rising order; of equally frequent tokens the lower ids."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for dialogue in dialogues:
        np.add.at(counts, list(dialogue.token_ids[dialogue.num_prompt_tokens :]), 1)
    frequent = np.argsort(-counts, kind="stable")[:size]
    ids: list[int] = sorted(frequent.tolist())
    return ids


def coverage(dialogues: Sequence[Dialogue], token_ids: Sequence[int]) -> float:
    """Share of the answers' tokens that are in the vocabulary."""
    known = set(token_ids)
    answers = [token for d in dialogues for token in d.token_ids[d.num_prompt_tokens :]]
    return sum(token in known for token in answers) / max(1, len(answers))
