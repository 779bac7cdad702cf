"""A row is drawn with its own noise and nothing else: no batch, no order, no row without noise changes it."""

from __future__ import annotations

import math

import pytest
import torch

from draftline_server.model.noise import Stream, noise_key
from draftline_server.model.sampling import sample, sample_probs

VOCAB_SIZE = 50


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))


def keys_of(rows: int) -> list[int]:
    return [noise_key(7, position, Stream.TARGET) for position in range(rows)]


def test_a_row_without_a_key_takes_the_most_probable_token() -> None:
    logits = random_logits(4)
    assert sample(logits, [None] * 4) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("greedy", [{0}, {2, 3}, {0, 1, 2, 3, 4}, set()], ids=["one", "two", "all", "none"])
def test_a_row_gives_the_same_token_in_any_batch(greedy: set[int]) -> None:
    logits = random_logits(5)
    keys = [None if row in greedy else key for row, key in enumerate(keys_of(5))]
    together = sample(logits, keys)
    alone = [sample(logits[row : row + 1], [keys[row]])[0] for row in range(5)]
    assert together == alone
    backwards = sample(logits.flip(0), keys[::-1])
    assert backwards[::-1] == together


def test_the_same_key_draws_the_same_token_and_others_draw_others() -> None:
    logits = random_logits(1)
    draws = [sample(logits, [noise_key(seed, 4, Stream.TARGET)])[0] for seed in range(60)]
    assert draws == [sample(logits, [noise_key(seed, 4, Stream.TARGET)])[0] for seed in range(60)]
    assert len(set(draws)) > 5


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((500, VOCAB_SIZE), -math.inf)
    logits[:, 7] = 0.0
    logits[:, 30] = -3.0
    assert set(sample(logits, keys_of(500))) == {7, 30}


def test_weights_need_not_sum_to_one() -> None:
    weights = torch.rand(200, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    keys = keys_of(200)
    assert sample_probs(weights, keys) == sample_probs(weights / weights.sum(dim=-1, keepdim=True), keys)


def test_the_same_noise_on_similar_distributions_mostly_draws_the_same_token() -> None:
    """What makes drafts drawn with the target's noise likely to be accepted."""
    logits = random_logits(1).expand(400, VOCAB_SIZE)
    similar = logits + 0.1 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    keys = keys_of(400)
    same = sum(a == b for a, b in zip(sample(logits, keys), sample(similar, keys), strict=True))
    other_keys = [noise_key(7, position, Stream.DRAFT) for position in range(400)]
    by_chance = sum(a == b for a, b in zip(sample(logits, keys), sample(similar, other_keys), strict=True))
    assert same > 360
    assert by_chance < 60
