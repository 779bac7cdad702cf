"""Verification gives the target's distribution, whatever the draft: up to 200 000 draws of each rule.

Straight on `verify`, with made-up distributions over 16 tokens. Each draw is a pair of tokens: where the
first was recovered, generation would go on in a next step, so the second is drawn from the target then.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from draftline_server.core.generation import GenerationRequest
from draftline_server.core.request import Request
from draftline_server.core.sampling_params import SamplingParams
from draftline_server.model.logits import RowContext, process_logits
from draftline_server.model.noise import Stream, noise_key
from draftline_server.model.sampling import sample
from draftline_server.speculation.proposer import Draft
from draftline_server.speculation.verification import Verified, VerifyTask, verify
from support.statistics import assert_distributed, chi_square_p_value, filtered

VOCAB_SIZE = 16
NUM_DRAWS = 200_000
CHUNK = 4_000
NO_ENDS: frozenset[int] = frozenset()

Rule = Literal["rejection", "coupled match", "one-hot match"]
Distance = Literal["near", "far", "equal", "disjoint"]

FILTERS: dict[str, SamplingParams] = {
    "none": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(top_k=4),
    "top-p": SamplingParams(top_p=0.7),
    "all": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02),
}


class Pair:
    """Logits of a target and a draft after nothing, after each first token, and after two."""

    def __init__(self, distance: Distance) -> None:
        generator = torch.Generator().manual_seed(2024)
        self.target = [1.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) for _ in range(3)]
        other = [1.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) for _ in range(3)]
        match distance:
            case "equal":
                self.draft = self.target
            case "near":
                self.draft = [p + 0.4 * q for p, q in zip(self.target, other, strict=True)]
            case "far":
                self.draft = other
            case "disjoint":
                self.draft = [-3.0 * p for p in self.target]

    def expected(self, params: SamplingParams) -> dict[tuple[int, int], float]:
        first = filtered(self.target[0][0].tolist(), params)
        return {
            (a, b): float(first[a] * second[b])
            for a in range(VOCAB_SIZE)
            for second in [filtered(self.target[1][a].tolist(), params)]
            for b in range(VOCAB_SIZE)
        }


def draw_pairs(
    rule: Rule, pair: Pair, params: SamplingParams, count: int
) -> tuple[Counter[tuple[int, int]], float]:
    """Pairs of tokens, and the share of first draft tokens that stood."""
    requests = [
        Request(
            GenerationRequest(request_id=str(i), prompt_token_ids=(1, 2), sampling=params),
            seed=0,
            sequence_number=i,
        )
        for i in range(CHUNK)
    ]
    follow_up = np.random.default_rng(7)
    cumulative = np.array([filtered(row.tolist(), params) for row in pair.target[1]]).cumsum(axis=1)
    pairs: Counter[tuple[int, int]] = Counter()
    num_accepted = 0
    for start in range(0, count, CHUNK):
        for index, request in enumerate(requests):
            request.seed = 1_000_003 * (start + index + 1)
        drafted, probs = propose(rule, pair, params, requests)
        before = ([0] * CHUNK, *drafted)
        rows = [logits[last] for logits, last in zip(pair.target, before, strict=True)]
        tasks = [
            VerifyTask(
                request,
                Draft("test", (a, b), None if probs is None else probs[index]),
                NO_ENDS,
            )
            for index, (request, a, b) in enumerate(zip(requests, *drafted, strict=True))
        ]
        results = verify(torch.stack(rows, dim=1).reshape(-1, VOCAB_SIZE), tasks)
        num_accepted += sum(result.num_accepted_tokens > 0 for result in results)
        for result in results:
            first = result.token_ids[0]
            if len(result.token_ids) > 1:
                pairs[first, result.token_ids[1]] += 1
            else:
                pairs[first, int(np.searchsorted(cumulative[first], follow_up.random()))] += 1
    return pairs, num_accepted / count


def propose(
    rule: Rule, pair: Pair, params: SamplingParams, requests: list[Request]
) -> tuple[list[list[int]], Tensor | None]:
    """Two tokens for each request, and q where the rule needs it ``[requests, 2, vocab]``."""
    if rule == "one-hot match":
        # The target's favourites half of the time, else anything.
        likely = int(pair.target[0][0].argmax())
        first = [likely if index % 2 else index % VOCAB_SIZE for index in range(CHUNK)]
        second: list[int] = pair.target[1][first].argmax(dim=-1).tolist()
        return [first, second], None
    stream = Stream.DRAFT if rule == "rejection" else Stream.TARGET
    row = RowContext(params, (), (), NO_ENDS)
    drafted: list[list[int]] = [[0] * CHUNK]
    probs: list[Tensor] = []
    for depth in range(2):
        processed = process_logits(pair.draft[depth][drafted[-1]], [row] * CHUNK)
        keys = [noise_key(request.seed, request.num_tokens + depth, stream) for request in requests]
        drafted.append(sample(processed, keys))
        probs.append(torch.softmax(processed, dim=-1))
    return drafted[1:], torch.stack(probs, dim=1) if rule == "rejection" else None


@pytest.mark.parametrize("rule", ["rejection", "coupled match", "one-hot match"])
def test_two_tokens_follow_the_targets_joint_distribution_under_all_filters(rule: Rule) -> None:
    pair, params = Pair("near"), FILTERS["all"]
    pairs, acceptance = draw_pairs(rule, pair, params, NUM_DRAWS if rule == "rejection" else 40_000)
    assert_distributed(pairs, pair.expected(params))
    assert 0.05 < acceptance < 0.95


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rule", "distance", "filters"),
    [
        *(("rejection", "near", filters) for filters in FILTERS),
        *(("rejection", "far", filters) for filters in ("none", "top-k", "all")),
        *(("coupled match", "near", filters) for filters in FILTERS),
        ("coupled match", "far", "all"),
        *(("one-hot match", "near", filters) for filters in FILTERS),
    ],
)
def test_two_tokens_of_200_000_draws_follow_the_targets_joint_distribution(
    rule: Rule, distance: Distance, filters: str
) -> None:
    pair, params = Pair(distance), FILTERS[filters]
    pairs, _ = draw_pairs(rule, pair, params, NUM_DRAWS)
    assert_distributed(pairs, pair.expected(params))


def test_rejection_accepts_as_often_as_the_distributions_overlap() -> None:
    """The most that is possible: sum of min(p, q). Matching gives less."""
    distances: list[Distance] = ["near", "far", "disjoint"]
    for distance in distances:
        pair, params = Pair(distance), FILTERS["none"]
        p = filtered(pair.target[0][0].tolist(), params)
        q = filtered(pair.draft[0][0].tolist(), params)
        overlap = float(np.minimum(p, q).sum())
        _, acceptance = draw_pairs("rejection", pair, params, 3 * CHUNK)
        assert acceptance == pytest.approx(overlap, abs=0.02)
        if distance == "near":
            _, matched = draw_pairs("coupled match", pair, params, 3 * CHUNK)
            assert (1 - (1 - overlap)) / (1 + (1 - overlap)) - 0.02 < matched < overlap


def test_the_test_would_see_a_target_that_is_slightly_biased() -> None:
    """What 200 000 draws are good for: 3 % taken from the target and given to the draft are beyond doubt."""
    pair, params = Pair("near"), FILTERS["none"]
    expected = pair.expected(params)
    draft = filtered(Pair("far").draft[0][0].tolist(), params)
    first = filtered(pair.target[0][0].tolist(), params)
    tilted = {
        (a, b): probability / first[a] * (0.97 * first[a] + 0.03 * draft[a])
        for (a, b), probability in expected.items()
    }
    outcomes = list(tilted)
    weights = np.array([tilted[outcome] for outcome in outcomes])
    drawn = np.random.default_rng(1).choice(len(outcomes), size=NUM_DRAWS, p=weights / weights.sum())
    observed = Counter(outcomes[int(index)] for index in drawn)
    assert chi_square_p_value(observed, tilted) > 1e-3
    assert chi_square_p_value(observed, expected) < 1e-6


def test_where_draft_and_target_agree_to_the_last_bit_nothing_is_rejected() -> None:
    """And the residual, which is then empty, is never drawn from."""
    for params in (FILTERS["none"], FILTERS["all"]):
        _, acceptance = draw_pairs("rejection", Pair("equal"), params, CHUNK)
        assert acceptance == 1.0


def request_of(seed: int) -> Request:
    spec = GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams())
    return Request(spec, seed=seed, sequence_number=0)


def test_a_draft_that_is_no_distribution_leaves_the_targets_as_it_is() -> None:
    """As of a draft model that overflows in a dtype that is too narrow for it."""
    pair, q = Pair("near"), torch.full((2, VOCAB_SIZE), float("nan"))
    rows = torch.stack([logits[0] for logits in pair.target])
    counts: Counter[int] = Counter()
    for seed in range(4_000):
        task = VerifyTask(request_of(1_000_003 * (seed + 1)), Draft("test", (3, 4), q), NO_ENDS)
        (token_id,) = verify(rows.clone(), [task])[0].token_ids
        counts[token_id] += 1
    expected = filtered(pair.target[0][0].tolist(), SamplingParams())
    assert_distributed(counts, {token_id: float(p) for token_id, p in enumerate(expected)})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_targets_logits_are_no_numbers_nothing_is_said_for_that_request_alone(
    temperature: float,
) -> None:
    sampling = SamplingParams(temperature=temperature)
    tasks = [
        VerifyTask(
            Request(
                GenerationRequest(request_id=str(index), prompt_token_ids=(1,), sampling=sampling),
                seed=index,
                sequence_number=index,
            ),
            Draft("test", (5,), None),
            NO_ENDS,
        )
        for index in range(3)
    ]
    logits = torch.zeros(6, VOCAB_SIZE)
    logits[:, 5] = 50.0
    logits[2] = float("nan")
    assert [v.token_ids for v in verify(logits.clone(), tasks)] == [(5, 5), (), (5, 5)]
    logits[2, :], logits[2, 7] = 0.0, 50.0  # the draft falls
    logits[3] = float("nan")  # behind it, where only the draft would have led
    assert [v.token_ids for v in verify(logits.clone(), tasks)] == [(5, 5), (7,), (5, 5)]


def test_a_target_and_a_draft_without_a_common_token_always_recover() -> None:
    request = request_of(5)
    infinity = float("inf")
    logits = torch.full((3, VOCAB_SIZE), -infinity)
    logits[:, 8:] = 0.0
    q = torch.zeros(2, VOCAB_SIZE)
    q[:, :8] = 1 / 8
    for seed in range(200):
        request.seed = seed
        result = verify(logits.clone(), [VerifyTask(request, Draft("test", (3, 4), q), NO_ENDS)])[0]
        assert isinstance(result, Verified)
        assert len(result.token_ids) == 1
        assert result.token_ids[0] >= 8
