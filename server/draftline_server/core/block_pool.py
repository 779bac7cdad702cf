"""Which blocks of the KV cache belong to whom, and which still hold a known prefix.

Pure bookkeeping: no tensors. A block is in one of three states:

    held     reference count > 0: some request's block table names it
    cached   count 0, but its content is known by hash: reusable, evicted in LRU order
    free     count 0 and content unknown

Target and draft share block ids: block ``b`` owns slots ``[b*block_size, (b+1)*block_size)`` in
both pools. The draft may lag, so each block says whether the draft's half is written too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BlockHash = bytes


@dataclass(slots=True)
class _Block:
    reference_count: int = 0
    content_hash: BlockHash | None = None
    is_draft_valid: bool = False


class BlockPool:
    """Allocates blocks, counts references and remembers full blocks by the hash of their prefix."""

    def __init__(self, *, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._blocks = [_Block() for _ in range(num_blocks)]
        # Both are ordered so that the block released longest ago is reused first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and those that only the cache holds."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks of unknown content; the caller has checked `num_available`."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            block_id, _ = self._free.popitem(last=False)
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
        block = self._blocks[block_id]
        block.reference_count = 1
        block.is_draft_valid = False
        return block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives back one reference to each block. Tail blocks become the first to be evicted."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.reference_count > 0, f"block {block_id} released twice"
            block.reference_count -= 1
            if block.reference_count == 0:
                (self._free if block.content_hash is None else self._cached)[block_id] = None

    def acquire_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Takes a reference to the longest leading run of blocks whose content is known."""
        found: list[int] = []
        for content_hash in hashes:
            block_id = self._by_hash.get(content_hash)
            if block_id is None:
                break
            block = self._blocks[block_id]
            if block.reference_count == 0:
                del self._cached[block_id]
            block.reference_count += 1
            found.append(block_id)
        return found

    def remember(self, block_id: int, content_hash: BlockHash) -> None:
        """Notes that a held block is full of committed tokens whose prefix has this hash.

        Where another block already has that content, this one stays anonymous.
        """
        block = self._blocks[block_id]
        assert block.reference_count > 0, f"block {block_id} is not held"
        if self._prefix_caching and block.content_hash is None and content_hash not in self._by_hash:
            block.content_hash = content_hash
            self._by_hash[content_hash] = block_id

    def mark_draft_valid(self, block_id: int) -> None:
        """Notes that the draft has written all slots of a held block."""
        self._blocks[block_id].is_draft_valid = True

    def leading_draft_valid(self, block_ids: Sequence[int]) -> range:
        """Indices of the first blocks that the draft has written, up to one that it has not."""
        for index, block_id in enumerate(block_ids):
            if not self._blocks[block_id].is_draft_valid:
                return range(index)
        return range(len(block_ids))

    def trailing_draft_valid(self, block_ids: Sequence[int]) -> range:
        """Indices of the last blocks that the draft has written, behind one that it has not."""
        for index in reversed(range(len(block_ids))):
            if not self._blocks[block_ids[index]].is_draft_valid:
                return range(index + 1, len(block_ids))
        return range(len(block_ids))

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        assert block.content_hash is not None
        del self._by_hash[block.content_hash]
        block.content_hash = None

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance."""
        for block_id, block in enumerate(self._blocks):
            places = [block.reference_count > 0, block_id in self._free, block_id in self._cached]
            assert places.count(True) == 1, f"block {block_id} is in {places}"
            if block_id in self._cached:
                assert block.content_hash is not None
            if block.content_hash is not None:
                assert self._by_hash[block.content_hash] == block_id
        assert len(self._by_hash) == sum(b.content_hash is not None for b in self._blocks)


def hash_block(previous: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a prefix that ends with this full block; `previous` is that of the blocks before."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=previous, digest_size=16).digest()
