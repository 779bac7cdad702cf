"""The data that a head learns from: files that are whole, a vocabulary, an order that needs no saving."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from draftline_server.distill.batches import Batch, BatchOrder
from draftline_server.distill.dialogues import Dialogue, read_dialogues, write_dialogues
from draftline_server.distill.vocabulary import choose_draft_vocabulary, coverage
from draftline_server.errors import ModelError

DIALOGUES = [Dialogue((5, 6, 7, 7), 2), Dialogue((9, 7), 1), Dialogue((1, 2, 3), 3)]


def test_dialogues_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "part.npz"
    for dialogues in (DIALOGUES, []):
        write_dialogues(path, dialogues)
        assert read_dialogues(path, vocab_size=10) == dialogues
    assert [p.name for p in tmp_path.iterdir()] == ["part.npz"]


@pytest.mark.parametrize("damage", ["cut", "no archive", "other arrays", "foreign tokens"])
def test_files_that_are_no_dialogues_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    import numpy as np

    path = tmp_path / "part.npz"
    write_dialogues(path, DIALOGUES)
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:100])
        case "no archive":
            path.write_text("hello")
        case "other arrays":
            np.savez(path, tokens=np.arange(4), lens=np.array([[1, 2]]))
    with pytest.raises(ModelError, match=r"part\.npz"):
        read_dialogues(path, vocab_size=8 if damage == "foreign tokens" else 10)


def test_the_vocabulary_is_the_most_frequent_tokens_of_answers() -> None:
    assert choose_draft_vocabulary(DIALOGUES, vocab_size=10, size=1) == [7]
    assert choose_draft_vocabulary(DIALOGUES, vocab_size=10, size=3) == [0, 1, 7]
    assert choose_draft_vocabulary(DIALOGUES, vocab_size=10, size=50) == list(range(10))
    assert coverage(DIALOGUES, [7]) == 1.0
    assert coverage(DIALOGUES, [5]) == 0.0


def test_every_dialogue_comes_once_in_an_epoch_and_the_order_depends_on_the_seed_alone() -> None:
    source = random.Random(3)
    lengths = [source.randint(2, 90) for _ in range(101)]
    order, again, other = (BatchOrder(lengths, batch_size=4, seed=seed) for seed in (1, 1, 2))
    assert order.steps_per_epoch == 25
    epochs = [[order.batch(step) for step in range(e * 25, e * 25 + 25)] for e in range(3)]
    for epoch in epochs:
        seen = Counter(index for batch in epoch for index in batch)
        assert len(seen) == 100
        assert set(seen.values()) == {1}
    assert epochs[0] != epochs[1]
    assert again.batch(30) == epochs[1][5], "asked for in any order"
    assert [other.batch(step) for step in range(25)] != epochs[0]
    spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in epochs[0]]
    assert sorted(spread)[len(spread) // 2] < 30, "texts of like length go together"


def test_learned_are_the_tokens_of_answers_alone() -> None:
    batch = Batch.of(DIALOGUES[:2], [torch.zeros(4, 1), torch.zeros(2, 1)])
    # True where the next token belongs to the answer; the last one has no next.
    assert batch.is_learned.tolist() == [[False, True, True, False], [True, False, False, False]]
