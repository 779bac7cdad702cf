"""A request's lengths follow its tokens, and its hashes the blocks that are full."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_server.core.block_pool import hash_block
from support.requests import make_request


def test_counts_follow_the_tokens() -> None:
    request = make_request(prompt=[1, 2, 3], output=[4, 5], max_tokens=7)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (5, 3, 2)
    assert request.num_remaining_tokens == 5
    assert request.num_uncomputed_tokens == 5
    assert not request.is_decoding
    request.target_len = 4
    assert request.is_decoding


def test_a_prompt_of_one_token_is_ready_to_decode_at_once() -> None:
    assert make_request(prompt=[9]).is_decoding


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        pytest.param({}, {8, 9}, id="end-of-sequence"),
        pytest.param({"stop_token_ids": (1, 2)}, {1, 2, 8, 9}, id="stop-tokens-add-to-it"),
        pytest.param({"stop_token_ids": (1,), "ignore_eos": True}, {1}, id="ignored"),
        pytest.param({"stop_token_ids": (8,), "ignore_eos": True}, {8}, id="ignored-but-named"),
    ],
)
def test_generation_ends_with(sampling: dict[str, Any], expected: set[int]) -> None:
    assert make_request(**sampling).end_token_ids(frozenset({8, 9})) == expected


def test_higher_priority_goes_first_and_then_the_earlier_arrival() -> None:
    requests = [
        make_request("late", sequence_number=2),
        make_request("early", sequence_number=1),
        make_request("urgent", priority=1, sequence_number=3),
        make_request("patient", priority=-1, sequence_number=0),
    ]
    order = [r.request_id for r in sorted(requests, key=lambda r: r.scheduling_key)]
    assert order == ["urgent", "early", "late", "patient"]


def test_block_hashes_chain_over_prompt_and_output_and_never_change() -> None:
    request = make_request(prompt=[1, 2, 3], output=[4, 5])
    first = request.block_hashes(1, 4)
    request.token_ids.extend([6, 7, 8])
    both = request.block_hashes(2, 4)
    assert both == [first[0], hash_block(first[0], [5, 6, 7, 8])]
    assert request.block_hashes(1, 4) == first
    assert request.block_hashes(0, 4) == []


def test_a_block_that_is_not_full_has_no_hash() -> None:
    with pytest.raises(AssertionError, match="only full blocks"):
        make_request(prompt=[1, 2, 3]).block_hashes(1, 4)


def test_equal_beginnings_have_equal_hashes() -> None:
    one, other = make_request(prompt=range(12)), make_request(prompt=[*range(8), 0, 0, 0, 0])
    ours, theirs = one.block_hashes(3, 4), other.block_hashes(3, 4)
    assert ours[:2] == theirs[:2]
    assert ours[2] != theirs[2]


def test_rewinding_forgets_the_cache_and_keeps_the_tokens() -> None:
    request = make_request(prompt=range(8), output=[1])
    request.block_table, request.target_len, request.draft_len = [3, 4], 8, 5
    request.num_remembered_blocks, request.num_draft_marked_blocks = 2, 1
    request.rewind()
    assert request.token_ids == [*range(8), 1]
    assert (request.block_table, request.target_len, request.draft_len) == ([], 0, 0)
    assert (request.num_remembered_blocks, request.num_draft_marked_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("target_len", "draft_len", "holds"),
    [
        pytest.param(0, 0, True, id="nothing-cached"),
        pytest.param(2, 2, True, id="all-but-the-newest"),
        pytest.param(2, 1, True, id="draft-lags"),
        pytest.param(1, 2, False, id="draft-ahead"),
        pytest.param(3, 0, False, id="newest-cached"),
        pytest.param(0, -1, False, id="negative"),
    ],
)
def test_the_invariant_of_lengths(target_len: int, draft_len: int, *, holds: bool) -> None:
    request = make_request(prompt=[1, 2, 3])
    request.target_len, request.draft_len = target_len, draft_len
    if holds:
        request.check_lengths()
    else:
        with pytest.raises(AssertionError, match="draft_len"):
            request.check_lengths()
