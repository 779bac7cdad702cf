"""Decides what the next step computes, and gives requests their blocks.

Pure Python, no tensors. Running requests decode first, each with room for its draft; what is left of
the token budget, at least half of what the decodes themselves leave, goes to prefill chunks in scheduling
order: a waiting request of higher priority starts before a running one's next chunk. When blocks run out,
drafts go first and then the running request that is last in order loses its blocks and waits to be computed
again. The first in order always makes progress, so nothing deadlocks.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftline_server.core.block_pool import BlockPool
from draftline_server.core.request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """One request's part of a step: feed ``token_ids[target_len : target_len + num_tokens]``."""

    request: Request
    num_tokens: int
    draft_length: int
    """The most draft tokens that the step may verify; slots for them are allocated."""

    @property
    def samples(self) -> bool:
        """Whether the step reaches the newest token, so that a next one can be sampled."""
        return self.num_tokens == self.request.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Holds no tensors, so that ranks could be told by broadcast."""

    scheduled: tuple[ScheduledRequest, ...]
    fresh_blocks: tuple[int, ...]
    """Given to these requests in this step, with what their last owners left in them."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens + s.draft_length for s in self.scheduled)


class Scheduler:
    """Owns the waiting and the running requests and the block pool."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        max_running: int,
        max_batched_tokens: int,
        draft_catches_up: bool = True,
    ) -> None:
        """`draft_catches_up`: whether the draft can read again the tokens of a prefix that it has missed."""
        self.pool = pool
        self._draft_catches_up = draft_catches_up
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.max_running = max_running
        self._max_batched_tokens = max_batched_tokens
        # Both in scheduling order.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._planned: dict[str, ScheduledRequest] = {}
        self._fresh_blocks: list[int] = []

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def reset_counts(self) -> None:
        """Starts the cumulative counts anew."""
        self.num_preemptions = self.prefix_cache_queries = self.prefix_cache_hits = 0

    def add(self, request: Request) -> None:
        """Queues a request that can fit the pool."""
        bisect.insort(self._waiting, request, key=lambda r: r.scheduling_key)

    def remove(self, request: Request) -> None:
        """Takes out a finished or aborted request and frees its blocks."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._release(request)

    def schedule(self, draft_lengths: Mapping[str, int]) -> StepPlan:
        """Plans a step. `draft_lengths` gives, by request id, the drafts wanted by decoding requests."""
        self._planned, self._fresh_blocks = {}, []
        decoding = [r for r in self._running if r.is_decoding]
        prefilling = [r for r in self._running if not r.is_decoding]
        budget = self._max_batched_tokens
        for request in decoding:
            budget -= self._plan_tokens(request, budget)
        drafts = self._share_out(decoding, draft_lengths, budget)
        budget -= sum(drafts)
        for request in prefilling:
            budget -= self._admit(budget, before=request)
            budget -= self._plan_tokens(request, budget)
        # After all that runs has its blocks: no draft is worth preempting for.
        for request, draft_length in zip(decoding, drafts, strict=True):
            self._plan_draft(request, draft_length)
        self._admit(budget)
        return StepPlan(tuple(self._planned.values()), tuple(self._fresh_blocks))

    def _share_out(self, decoding: Sequence[Request], wanted: Mapping[str, int], budget: int) -> list[int]:
        """Draft lengths within the budget, of which prefill keeps half where there is any to do."""
        may_start = bool(self._waiting) and len(self._running) < self.max_running
        if may_start or len(decoding) < len(self._running):
            budget //= 2
        lengths: list[int] = []
        for request in decoding:
            lengths.append(min(wanted.get(request.request_id, 0), budget))
            budget -= lengths[-1]
        return lengths

    def _plan_tokens(self, request: Request, budget: int) -> int:
        """Plans a decode's token or a prefill's next chunk; returns the number of tokens."""
        num_tokens = min(request.num_uncomputed_tokens, budget)
        if num_tokens <= 0 or request not in self._running:
            return 0  # preempted for one that goes before it
        if not self._grow(request, request.target_len + num_tokens):
            return 0
        self._planned[request.request_id] = ScheduledRequest(request, num_tokens, 0)
        return num_tokens

    def _plan_draft(self, request: Request, draft_length: int) -> None:
        """Makes room for a draft, if that takes nothing from anyone."""
        item = self._planned.get(request.request_id)
        missing = self._num_missing_blocks(request, request.num_tokens + draft_length)
        if item is not None and missing <= self.pool.num_available:
            self._allocate(request, missing)
            item.draft_length = draft_length

    def _admit(self, budget: int, *, before: Request | None = None) -> int:
        """Starts waiting requests in order while tokens, places and blocks last; returns the tokens they get.

        Only those that go before a running one, where it is given.
        """
        left = budget
        while self._waiting and left > 0 and len(self._running) < self.max_running:
            request = self._waiting[0]
            if before is not None and request.scheduling_key >= before.scheduling_key:
                break
            self._take_prefix(request)
            # Room for everything it has now: a request that starts must not push others out at once.
            if self._num_missing_blocks(request, request.num_tokens) > self.pool.num_available:
                self._release(request)
                break
            self._waiting.pop(0)
            bisect.insort(self._running, request, key=lambda r: r.scheduling_key)
            self._count_prefix(request)
            left -= self._plan_tokens(request, left)
        return budget - left

    def _take_prefix(self, request: Request) -> None:
        """Starts from cached blocks; the newest token is always left to be computed."""
        block_size = self.pool.block_size
        num_full_blocks = (request.num_tokens - 1) // block_size
        hashes = request.block_hashes(num_full_blocks, block_size)
        request.block_table = self.pool.acquire_prefix(hashes)
        request.num_remembered_blocks = len(request.block_table)
        request.target_len = request.num_remembered_blocks * block_size
        find = self.pool.leading_draft_valid if self._draft_catches_up else self.pool.trailing_draft_valid
        valid = find(request.block_table)
        request.draft_start, request.draft_len = valid.start * block_size, valid.stop * block_size
        request.num_draft_marked_blocks = valid.stop

    def _count_prefix(self, request: Request) -> None:
        """Counts a first start; one after a preemption finds what the request itself has left."""
        if request.first_scheduled_time is None:
            request.num_cached_tokens = request.target_len
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.target_len

    def _grow(self, request: Request, num_slots: int) -> bool:
        """Gives the request blocks for `num_slots`; False where it had to be preempted itself."""
        if self._num_missing_blocks(request, num_slots) > self.pool.num_available:
            self._take_back_spare_blocks()
        while (missing := self._num_missing_blocks(request, num_slots)) > self.pool.num_available:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self._allocate(request, missing)
        return True

    def _take_back_spare_blocks(self) -> None:
        """Those of drafts that did not stand; no one is to be preempted for them."""
        for request in self._running:
            num_needed = self._num_blocks_for(request.num_tokens)
            self.pool.release(request.block_table[num_needed:])
            del request.block_table[num_needed:]

    def _allocate(self, request: Request, count: int) -> None:
        block_ids = self.pool.allocate(count)
        request.block_table.extend(block_ids)
        self._fresh_blocks.extend(block_ids)

    def _num_missing_blocks(self, request: Request, num_slots: int) -> int:
        return max(0, self._num_blocks_for(num_slots) - len(request.block_table))

    def _num_blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.pool.block_size)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._planned.pop(request.request_id, None)
        self._release(request)
        self.add(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_table)
        request.rewind()

    def remember_full_blocks(self, request: Request) -> None:
        """Lets others find the blocks that are now full of committed, computed tokens."""
        block_size = self.pool.block_size
        hashes = request.block_hashes(request.target_len // block_size, block_size)
        for index in range(request.num_remembered_blocks, len(hashes)):
            self.pool.remember(request.block_table[index], hashes[index])
        request.num_remembered_blocks = len(hashes)
        first_whole = -(-request.draft_start // block_size)
        num_draft_full = request.draft_len // block_size
        for index in range(max(request.num_draft_marked_blocks, first_whole), num_draft_full):
            self.pool.mark_draft_valid(request.block_table[index])
        request.num_draft_marked_blocks = max(request.num_draft_marked_blocks, num_draft_full)
