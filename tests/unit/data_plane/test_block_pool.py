"""Blocks are never lent twice, never lost, and found again by the hash of the prefix that they hold."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from draftline_server.core.block_pool import BlockHash, BlockPool, hash_block


def make_pool(num_blocks: int, *, prefix_caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=4, prefix_caching=prefix_caching)


def hashes(*blocks: tuple[int, ...]) -> list[BlockHash]:
    """Hashes of a prefix made of these blocks."""
    result: list[BlockHash] = []
    for block in blocks:
        result.append(hash_block(result[-1] if result else b"", block))
    return result


def test_a_pool_hands_out_every_block_once() -> None:
    pool = make_pool(5)
    taken = pool.allocate(2) + pool.allocate(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_available, pool.num_held) == (0, 5)
    pool.check_integrity()


def test_asking_for_more_than_there_is_is_an_error_of_the_caller() -> None:
    pool = make_pool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 available"):
        pool.allocate(3)
    assert pool.num_available == 2


def test_releasing_a_block_twice_is_an_error_of_the_caller() -> None:
    pool = make_pool(2)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(taken)


def test_released_blocks_of_unknown_content_are_available_again() -> None:
    pool = make_pool(3)
    pool.release(pool.allocate(3))
    assert pool.num_available == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_remembered_block_is_found_by_its_prefix_while_held_and_after() -> None:
    pool = make_pool(3)
    first, second = hashes((1, 2, 3, 4), (5, 6, 7, 8))
    mine = pool.allocate(2)
    pool.remember(mine[0], first)
    pool.remember(mine[1], second)
    assert pool.acquire_prefix([first, second]) == mine
    pool.release(mine)
    assert pool.num_held == 2, "the other owner still holds them"
    pool.release(mine)
    assert pool.num_available == 3
    assert pool.acquire_prefix([first, second]) == mine
    assert pool.num_held == 2
    pool.check_integrity()


def test_only_the_leading_run_of_known_blocks_is_taken() -> None:
    pool = make_pool(4)
    chain = hashes((1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3))
    mine = pool.allocate(3)
    pool.remember(mine[0], chain[0])
    pool.remember(mine[2], chain[2])
    pool.release(mine)
    assert pool.acquire_prefix(chain) == mine[:1]


def test_a_block_without_known_content_is_used_before_a_cached_one() -> None:
    pool = make_pool(3)
    mine = pool.allocate(3)
    pool.remember(mine[1], hashes((1, 2, 3, 4))[0])
    pool.release(mine)
    assert set(pool.allocate(2)) == {mine[0], mine[2]}
    assert pool.acquire_prefix(hashes((1, 2, 3, 4))) == [mine[1]]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = make_pool(3)
    chain = hashes((1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3))
    mine = pool.allocate(3)
    for block_id, content_hash in zip(mine, chain, strict=True):
        pool.remember(block_id, content_hash)
    pool.release(mine)
    assert pool.allocate(1) == mine[2:]
    assert pool.acquire_prefix(chain) == mine[:2]


def test_the_prefix_used_longest_ago_is_evicted_first() -> None:
    pool = make_pool(2)
    old, new = hashes((1, 1, 1, 1))[0], hashes((2, 2, 2, 2))[0]
    first, second = pool.allocate(1), pool.allocate(1)
    pool.remember(first[0], old)
    pool.remember(second[0], new)
    pool.release(first)
    pool.release(second)
    pool.release(pool.acquire_prefix([old]))  # used again, so `new` is now the older one
    assert pool.allocate(1) == second
    assert pool.acquire_prefix([new]) == []
    assert pool.acquire_prefix([old]) == first


def test_two_blocks_with_the_same_content_do_not_confuse_the_books() -> None:
    pool = make_pool(2)
    content_hash = hashes((1, 2, 3, 4))[0]
    first, second = pool.allocate(1), pool.allocate(1)
    pool.remember(first[0], content_hash)
    pool.remember(second[0], content_hash)
    pool.release(second)
    pool.check_integrity()
    assert pool.acquire_prefix([content_hash]) == first


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = make_pool(2, prefix_caching=False)
    content_hash = hashes((1, 2, 3, 4))[0]
    mine = pool.allocate(1)
    pool.remember(mine[0], content_hash)
    assert pool.acquire_prefix([content_hash]) == []
    pool.release(mine)
    pool.check_integrity()


def test_a_block_is_draft_valid_from_its_marking_until_it_gets_other_content() -> None:
    pool = make_pool(2)
    chain = hashes((1, 1, 1, 1), (2, 2, 2, 2))
    mine = pool.allocate(2)
    for block_id, content_hash in zip(mine, chain, strict=True):
        pool.remember(block_id, content_hash)
    pool.mark_draft_valid(mine[0])
    assert pool.leading_draft_valid(mine) == range(1)
    pool.release(mine)
    assert pool.leading_draft_valid(pool.acquire_prefix(chain)) == range(1)
    pool.release(mine)
    assert pool.leading_draft_valid(pool.allocate(2)) == range(0)


def test_draft_valid_blocks_count_up_to_a_gap_from_either_end() -> None:
    pool = make_pool(4)
    mine = pool.allocate(4)
    for index in (0, 2, 3):
        pool.mark_draft_valid(mine[index])
    assert pool.leading_draft_valid(mine) == range(1)
    assert pool.trailing_draft_valid(mine) == range(2, 4)
    assert pool.trailing_draft_valid(mine[:2]) == range(2, 2)
    assert pool.trailing_draft_valid(mine[2:]) == range(2)
    assert pool.leading_draft_valid([]) == pool.trailing_draft_valid([]) == range(0)


def test_the_hash_of_a_block_depends_on_everything_before_it() -> None:
    tokens = (1, 2, 3, 4)
    assert hash_block(b"", tokens) == hash_block(b"", list(tokens))
    assert hash_block(b"", tokens) != hash_block(hash_block(b"", tokens), tokens)
    assert hash_block(b"", (1, 2, 3, 5)) != hash_block(b"", tokens)
    assert hash_block(b"", (2, 1, 3, 4)) != hash_block(b"", tokens)


@dataclass
class _Model:
    """What the pool must do, said in the simplest way: the owners of each block, and known contents."""

    tables: list[list[int]] = field(default_factory=list)
    chains: list[list[BlockHash]] = field(default_factory=list)

    def references(self) -> Counter[int]:
        return Counter(block_id for table in self.tables for block_id in table)


def _play(pool: BlockPool, model: _Model, rng: random.Random) -> None:
    """One random action, as a scheduler would do it."""
    action = rng.randrange(4)
    if action == 0 or not model.tables:
        # Few distinct prefixes, so that they meet.
        chain = hashes(*[(rng.randrange(2),) * 4 for _ in range(rng.randint(1, 4))])
        table = pool.acquire_prefix(chain)
        missing = len(chain) - len(table)
        if missing > pool.num_available:
            pool.release(table)
            return
        table += pool.allocate(missing)
        model.tables.append(table)
        model.chains.append(chain)
    elif action == 1:
        index = rng.randrange(len(model.tables))
        for block_id, content_hash in zip(model.tables[index], model.chains[index], strict=True):
            pool.remember(block_id, content_hash)
    elif action == 2:
        pool.mark_draft_valid(rng.choice(rng.choice(model.tables)))
    else:
        index = rng.randrange(len(model.tables))
        pool.release(model.tables.pop(index))
        model.chains.pop(index)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("seed", range(8))
def test_random_use_keeps_the_books_balanced(seed: int, prefix_caching: bool) -> None:
    rng = random.Random(seed)
    pool = make_pool(rng.randint(4, 20), prefix_caching=prefix_caching)
    model = _Model()
    holders: dict[int, BlockHash] = {}
    for _ in range(400):
        _play(pool, model, rng)
        pool.check_integrity()
        references = model.references()
        assert pool.num_held == len(references)
        # A shared block holds the same prefix for all of its owners.
        holders.clear()
        for table, chain in zip(model.tables, model.chains, strict=True):
            assert len(set(table)) == len(table)
            for block_id, content_hash in zip(table, chain, strict=True):
                assert holders.setdefault(block_id, content_hash) == content_hash
        if not prefix_caching:
            assert set(references.values()) <= {1}
    for table in model.tables:
        pool.release(table)
    assert pool.num_available == pool.num_blocks
    pool.check_integrity()
