"""Estimates are conditional on what went before, and a draft tells nothing of what it did not reach."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from draftline_server.speculation.acceptance import NUM_POSITIONS, AcceptanceTracker


def observe(
    tracker: AcceptanceTracker, drafted: int, accepted: int, *, request_id: str = "r", times: int = 1
) -> None:
    for _ in range(times):
        tracker.observe(request_id, "ngram", "ngram", num_draft_tokens=drafted, num_accepted_tokens=accepted)


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


def conditionals(tracker: AcceptanceTracker, length: int) -> list[float]:
    """Acceptance of each position given all before it, of a request not seen before."""
    survivals = [1.0, *tracker.survivals("another", "ngram", length)]
    return [later / earlier for earlier, later in pairwise(survivals)]


def test_a_draft_that_failed_at_once_says_nothing_of_later_positions() -> None:
    tracker = AcceptanceTracker()
    observe(tracker, 4, 4, times=30)
    before = conditionals(tracker, 4)
    observe(tracker, 4, 0, times=15)
    after = conditionals(tracker, 4)
    assert after[0] < before[0] - 0.3
    assert all(later > 0.8 for later in after[1:])


def test_what_is_no_longer_seen_of_a_position_gives_way_to_what_is_seen_before_it() -> None:
    """So that drafts can grow again: positions that are never drafted would else stay as bad as they were."""
    tracker = AcceptanceTracker()
    observe(tracker, 3, 1, times=50)
    first, second, third = conditionals(tracker, 3)
    assert first > 0.9
    assert second < 0.1
    observe(tracker, 1, 1, times=300)
    first, second, third = conditionals(tracker, 3)
    assert min(first, second, third) > 0.8


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_estimates_find_the_conditional_rate_whatever_the_draft_length(rate: float) -> None:
    rng = random.Random(3)
    tracker = AcceptanceTracker()
    seen = [0.0, 0.0]
    num_drafts = 3_000
    for _ in range(num_drafts):
        drafted = rng.randint(1, 4)
        accepted = 0
        while accepted < drafted and rng.random() < rate:
            accepted += 1
        observe(tracker, drafted, accepted, request_id=f"r{rng.randrange(50)}")
        seen = [total + estimate for total, estimate in zip(seen, conditionals(tracker, 2), strict=True)]
    assert seen[0] / num_drafts == pytest.approx(rate, abs=0.03)
    assert seen[1] / num_drafts == pytest.approx(rate, abs=0.06)


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
    assert tracker.first_acceptance("draft_model") == AcceptanceTracker.INITIAL_ACCEPTANCE
    assert tracker.survivals("r", "draft_model", 1) == [AcceptanceTracker.INITIAL_ACCEPTANCE]


def test_what_a_request_did_is_forgotten_with_it_and_stays_in_the_whole() -> None:
    tracker = AcceptanceTracker()
    observe(tracker, 1, 0, request_id="gone", times=20)
    tracker.forget("gone")
    tracker.forget("gone")
    assert tracker.survivals("gone", "ngram", 1) == tracker.survivals("new", "ngram", 1)
    assert tracker.first_acceptance("ngram") < 0.2


def test_a_probe_weighs_more_than_an_ordinary_draft() -> None:
    ordinary, probed = AcceptanceTracker(), AcceptanceTracker()
    for tracker in (ordinary, probed):
        observe(tracker, 1, 0, times=60)
    for _ in range(10):
        for tracker in (ordinary, probed):
            tracker.observe(
                "p", "ngram", "ngram", num_draft_tokens=1, num_accepted_tokens=1, is_probe=tracker is probed
            )
    assert ordinary.first_acceptance("ngram") < 0.3
    assert probed.first_acceptance("ngram") > 0.5


def test_long_drafts_share_an_estimate_beyond_the_last_position() -> None:
    tracker = AcceptanceTracker()
    observe(tracker, 64, 64)
    observe(tracker, 64, NUM_POSITIONS + 20, request_id="other")
    estimates = conditionals(tracker, 64)
    assert estimates[NUM_POSITIONS - 2] != pytest.approx(estimates[NUM_POSITIONS], abs=1e-6)
    assert estimates[40] == pytest.approx(estimates[63], abs=0.01)
