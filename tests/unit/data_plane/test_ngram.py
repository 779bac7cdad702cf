"""The index finds what a search through all tokens finds, and drafts are what followed there."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from draftline_server.speculation.ngram import NgramIndex, NgramProposer
from draftline_server.speculation.proposer import DraftTask
from support.requests import make_request


def search(tokens: Sequence[int], min_length: int, max_length: int) -> tuple[int, int] | None:
    """Where the longest, then most recent earlier match of the last tokens ends, the slow way."""
    for length in range(max_length, min_length - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length < len(tokens) and tokens[end - length : end] == tokens[-length:]:
                return end, length
    return None


def propose(tokens: Sequence[int], limit: int) -> tuple[int, ...]:
    proposer = NgramProposer(min_length=2, max_length=4)
    request = make_request(prompt=tokens)
    length = proposer.max_length(request, limit)
    (draft,) = proposer.propose([DraftTask(request, length)])
    assert len(draft.token_ids) == length
    assert (draft.proposer, draft.probs) == ("ngram", None)
    return draft.token_ids


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        pytest.param([1], 4, (), id="one-token"),
        pytest.param([1, 2, 3, 4], 4, (), id="no-match"),
        pytest.param([1, 2, 9, 9, 1, 2], 2, (9, 9), id="match"),
        pytest.param([1, 9, 9, 1], 2, (), id="match-too-short"),
        pytest.param([1, 2, 7, 1, 2, 8, 1, 2], 1, (8,), id="the-latest-of-several"),
        pytest.param([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 1, (7,), id="the-longest-before-the-latest"),
        pytest.param([3, 3, 3], 5, (3, 3, 3, 3, 3), id="repetition-goes-on"),
        pytest.param([1, 2, 3, 1, 2, 3, 1, 2], 7, (3, 1, 2, 3, 1, 2, 3), id="period-goes-on"),
        pytest.param([1, 2, 9, 1, 2], 0, (), id="nothing-wanted"),
    ],
)
def test_proposes_what_followed_the_last_time(
    tokens: list[int], limit: int, expected: tuple[int, ...]
) -> None:
    assert propose(tokens, limit) == expected


@pytest.mark.parametrize(("min_length", "max_length"), [(1, 1), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_random_sequences_match_like_a_search_through_all_of_them(
    seed: int, min_length: int, max_length: int
) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        index = NgramIndex(min_length=min_length, max_length=max_length)
        tokens: list[int] = []
        while len(tokens) < 60:
            # As many as a step commits; sometimes none, as when two look-ups meet in a step.
            tokens.extend(rng.choices(range(3), k=rng.choice([0, 1, 1, 2, 7])))
            if tokens:
                assert index.find(tokens) == search(tokens, min_length, max_length)


def test_a_draft_always_follows_an_earlier_occurrence() -> None:
    rng = random.Random(1)
    for _ in range(200):
        tokens = rng.choices(range(4), k=rng.randint(3, 40))
        limit = rng.randint(1, 8)
        drafted = propose(tokens, limit)
        match = search(tokens, 2, 4)
        if match is None:
            assert drafted == ()
        else:
            # What a reader of the text, continuing from the match, would copy.
            copied = list(tokens)
            for offset in range(limit):
                copied.append(copied[match[0] + offset])
            assert drafted == tuple(copied[len(tokens) :])


def test_drafts_are_of_a_kind_by_the_length_of_their_match() -> None:
    proposer = NgramProposer(min_length=2, max_length=4)
    for tokens, kind in (
        ([1, 2, 3], "ngram"),
        ([1, 2, 9, 1, 2], "ngram/2"),
        ([5, 1, 2, 9, 5, 1, 2], "ngram/3"),
        ([3] * 9, "ngram/4"),
    ):
        request = make_request(kind, tokens)
        assert proposer.kind(request) == kind
        assert (proposer.max_length(request, 3) > 0) == (kind != "ngram")


def test_requests_do_not_see_each_other_and_released_ones_are_forgotten() -> None:
    proposer = NgramProposer(min_length=2, max_length=2)
    one, other = make_request("one", [1, 2, 3, 1, 2]), make_request("other", [1, 2])
    assert proposer.max_length(one, 4) == 4
    assert proposer.max_length(other, 4) == 0
    proposer.release(one)
    proposer.release(one)
    reborn = make_request("one", [1, 2])
    assert proposer.max_length(reborn, 4) == 0


def test_the_index_follows_the_tokens_as_they_are_committed() -> None:
    proposer = NgramProposer(min_length=2, max_length=3)
    request = make_request(prompt=[1, 2, 3])
    assert proposer.max_length(request, 2) == 0
    request.token_ids.extend([1, 2])
    assert proposer.propose([DraftTask(request, 2)])[0].token_ids == (3, 1)
    request.token_ids.append(7)
    assert proposer.max_length(request, 2) == 0
    request.token_ids.extend([2, 7])
    assert proposer.propose([DraftTask(request, 3)])[0].token_ids == (2, 7, 2)


def test_several_requests_are_served_in_order() -> None:
    proposer = NgramProposer(min_length=1, max_length=2)
    requests = [make_request(f"r{i}", [i, 9, i]) for i in range(3)]
    drafts = proposer.propose([DraftTask(r, 2) for r in requests])
    assert [d.token_ids for d in drafts] == [(9, i) for i in range(3)]
