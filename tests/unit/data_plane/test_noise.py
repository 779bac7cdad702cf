"""The keyed noise is as good as random where sampling relies on it: uniform, and independent of all else."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from draftline_server.model.noise import Stream, exponential_noise, noise_key, uniform_noise
from draftline_server.model.sampling import sample_probs

LEVEL = 1e-3
CPU = torch.device("cpu")
VOCAB_SIZE = 1024


def uniforms(keys: list[int], vocab_size: int = VOCAB_SIZE) -> NDArray[np.float64]:
    """The noise as uniform variates, ``[keys, vocab]``."""
    noise = exponential_noise(keys, vocab_size, CPU).double().numpy()
    assert (noise > 0).all()
    assert np.isfinite(noise).all()
    result: NDArray[np.float64] = -np.expm1(-noise)
    return result


def keys_along(axis: str, count: int) -> list[int]:
    """Keys that differ in one thing only."""
    match axis:
        case "position":
            return [noise_key(42, position, Stream.TARGET) for position in range(count)]
        case "seed":
            return [noise_key(seed, 7, Stream.TARGET) for seed in range(count)]
        case "high bits of the seed":
            return [noise_key(seed << 40, 7, Stream.TARGET) for seed in range(count)]
    raise AssertionError(axis)


AXES = ["position", "seed", "high bits of the seed"]


def assert_uniform(values: NDArray[np.float64], cells: int = 100) -> None:
    observed, _ = np.histogram(values, bins=cells, range=(0.0, 1.0))
    assert stats.chisquare(observed).pvalue > LEVEL


def assert_independent(first: NDArray[np.float64], second: NDArray[np.float64], cells: int = 16) -> None:
    """Pairs fill the square evenly."""
    observed, _, _ = np.histogram2d(first.ravel(), second.ravel(), bins=cells, range=((0, 1), (0, 1)))
    assert stats.chisquare(observed.ravel()).pvalue > LEVEL


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_over_all_keys_and_for_each_token(axis: str) -> None:
    values = uniforms(keys_along(axis, 1000))
    assert_uniform(values)
    for token_id in (0, 1, 2, 511, VOCAB_SIZE - 1):
        assert_uniform(values[:, token_id], cells=20)


@pytest.mark.parametrize("axis", AXES)
def test_noise_of_neighbouring_keys_and_tokens_is_independent(axis: str) -> None:
    values = uniforms(keys_along(axis, 400))
    assert_independent(values[:-1], values[1:])
    assert_independent(values[:, :-1], values[:, 1:])
    assert_independent(values[:, :512], values[:, 512:])
    assert_independent(values[:-1, :-1], values[1:, 1:])
    assert_independent(values[:-1, 1:], values[1:, :-1])


def test_streams_of_one_position_are_independent() -> None:
    by_stream = {
        stream: uniforms([noise_key(3, position, stream) for position in range(400)]) for stream in Stream
    }
    for one, other in itertools.combinations(Stream, 2):
        assert_independent(by_stream[one], by_stream[other])
    # The next position's stream 0 is not this one's stream 3, or anything like it.
    assert_independent(by_stream[Stream.ACCEPT][:-1], by_stream[Stream.TARGET][1:])


def test_the_uniform_variate_of_a_key_is_independent_of_its_token_noise() -> None:
    keys = [noise_key(seed, 5, Stream.ACCEPT) for seed in range(4000)]
    single = np.array([uniform_noise(key) for key in keys])
    assert_uniform(single)
    assert single.min() > 0.0
    assert single.max() < 1.0
    noise = uniforms(keys, 64)
    for token_id in (0, 1, 63):
        assert_independent(single, noise[:, token_id], cells=8)


def test_keys_do_not_repeat() -> None:
    keys = {
        noise_key(seed, position, stream)
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
        for position in range(5000)
        for stream in Stream
    }
    assert len(keys) == 5 * 5000 * len(Stream)


def test_noise_is_the_same_in_any_batch() -> None:
    keys = [noise_key(seed, 9, Stream.TARGET) for seed in range(8)]
    together = exponential_noise(keys, VOCAB_SIZE, CPU)
    for index, key in enumerate(keys):
        assert torch.equal(exponential_noise([key], VOCAB_SIZE, CPU)[0], together[index])
    # A token's noise does not depend on how many tokens there are.
    assert torch.equal(exponential_noise(keys, 64, CPU), together[:, :64])


def test_noise_never_changes() -> None:
    """Seeds promise the same text from release to release: this is what they were worth on the first day."""
    keys = [noise_key(0, 0, Stream.TARGET), noise_key(2**64 - 1, 123_456, Stream.DRAFT)]
    assert keys == KNOWN_KEYS
    assert exponential_noise(keys, 3, CPU).tolist() == [pytest.approx(row, rel=1e-6) for row in KNOWN_NOISE]


KNOWN_KEYS = [12035550249420947055, 13561263928369542786]
KNOWN_NOISE = [
    [0.13823089003562927, 1.7338985204696655, 2.7525267601013184],
    [2.6744377613067627, 0.049258116632699966, 0.2967115640640259],
]


def test_very_little_noise_is_as_rare_as_it_should_be() -> None:
    """The least noise decides, so that improbable tokens depend on this end of it."""
    keys = keys_along("position", 60)
    num_tokens = 2**20
    hits = Counter[float]()
    for key in keys:
        noise = exponential_noise([key], num_tokens, CPU)
        for threshold in (1e-3, 1e-4, 1e-5, 1e-6):
            hits[threshold] += int((noise < threshold).sum())
    for threshold, count in hits.items():
        assert stats.binomtest(count, len(keys) * num_tokens, threshold).pvalue > LEVEL


def test_an_improbable_token_is_drawn_as_rarely_as_it_should_be() -> None:
    count, probability = 200_000, 1e-3
    keys = [noise_key(seed, 1, Stream.TARGET) for seed in range(count)]
    probs = torch.tensor([1 - probability, probability]).expand(count, 2)
    assert stats.binomtest(sum(sample_probs(probs, keys)), count, probability).pvalue > LEVEL
