"""Estimates are conditional on what went before, and a draft tells nothing of what it did not reach."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from draftline_server.speculation.acceptance import NUM_POSITIONS, AcceptanceTracker


def observe(tracker: AcceptanceTracker, drafted: int, accepted: int, *, request_id: str = "r", times: int = 1) -> None:
    for _ in range(times):
        tracker.observe(request_id, "ngram", num_draft_tokens=drafted, num_accepted_tokens=accepted)


def test_before_anything_was_seen_all_positions_are_equally_likely() -> None:
    survivals = AcceptanceTracker().survivals("r", "ngram", 3)
    first = AcceptanceTracker.INITIAL_ACCEPTANCE
    assert survivals == pytest.approx([first, first**2, first**3])


@pytest.mark.parametrize("length", [0, 1, 5, NUM_POSITIONS, 4 * NUM_POSITIONS])
def test_survivals_fall_with_the_position(length: int) -> None:
    tracker = AcceptanceTracker()
    rng = random.Random(1)
    for _ in range(50):
        drafted = rng.randint(1, 12)
        observe(tracker, drafted, rng.randint(0, drafted))
    survivals = tracker.survivals("r", "ngram", length)
    assert len(survivals) == length
    assert all(0 < later <= earlier <= 1 for earlier, later in pairwise([1.0, *survivals]))


def test_a_draft_that_failed_at_once_says_nothing_of_later_positions() -> None:
    tracker = AcceptanceTracker()
    observe(tracker, 4, 4, times=30)
    before = [tracker.global_acceptance("ngram", position) for position in range(4)]
    observe(tracker, 4, 0, times=30)
    after = [tracker.global_acceptance("ngram", position) for position in range(4)]
    assert after[0] < before[0] - 0.4
    assert all(later > 0.8 for later in after[1:])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_estimates_find_the_conditional_rate_whatever_the_draft_length(rate: float) -> None:
    rng = random.Random(3)
    tracker = AcceptanceTracker()
    for _ in range(3_000):
        drafted = rng.randint(1, 4)
        accepted = 0
        while accepted < drafted and rng.random() < rate:
            accepted += 1
        observe(tracker, drafted, accepted, request_id=f"r{rng.randrange(50)}")
    assert tracker.global_acceptance("ngram", 0) == pytest.approx(rate, abs=0.15)
    assert tracker.global_acceptance("ngram", 1) == pytest.approx(rate, abs=0.2)


def test_a_new_request_begins_with_what_others_had() -> None:
    tracker = AcceptanceTracker()
    observe(tracker, 2, 2, request_id="old", times=40)
    assert tracker.survivals("new", "ngram", 1)[0] > 0.9


def test_requests_are_told_apart() -> None:
    tracker = AcceptanceTracker()
    for _ in range(20):
        observe(tracker, 3, 3, request_id="easy")
        observe(tracker, 3, 0, request_id="hard")
    easy, hard = (tracker.survivals(name, "ngram", 1)[0] for name in ("easy", "hard"))
    assert easy > 0.8
    assert hard < 0.2


def test_proposers_are_told_apart() -> None:
    tracker = AcceptanceTracker()
    observe(tracker, 3, 0, times=20)
    assert tracker.global_acceptance("draft_model", 0) == AcceptanceTracker.INITIAL_ACCEPTANCE
    assert tracker.survivals("r", "draft_model", 1) == [AcceptanceTracker.INITIAL_ACCEPTANCE]


def test_what_a_request_did_is_forgotten_with_it_and_stays_in_the_whole() -> None:
    tracker = AcceptanceTracker()
    observe(tracker, 1, 0, request_id="gone", times=20)
    tracker.forget("gone")
    tracker.forget("gone")
    assert tracker.survivals("gone", "ngram", 1) == tracker.survivals("new", "ngram", 1)
    assert tracker.global_acceptance("ngram", 0) < 0.2


def test_a_probe_weighs_more_than_an_ordinary_draft() -> None:
    ordinary, probed = AcceptanceTracker(), AcceptanceTracker()
    for tracker in (ordinary, probed):
        observe(tracker, 1, 0, times=60)
    for _ in range(4):
        for tracker in (ordinary, probed):
            tracker.observe(
                "p", "ngram", num_draft_tokens=1, num_accepted_tokens=1, is_probe=tracker is probed
            )
    assert ordinary.global_acceptance("ngram", 0) < 0.2
    assert probed.global_acceptance("ngram", 0) > 0.4


def test_long_drafts_share_an_estimate_beyond_the_last_position() -> None:
    tracker = AcceptanceTracker()
    observe(tracker, 64, 64)
    assert tracker.global_acceptance("ngram", NUM_POSITIONS - 1) == tracker.global_acceptance("ngram", 63)
    assert len(tracker.survivals("r", "ngram", 64)) == 64
