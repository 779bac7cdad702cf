"""Steps keep to their budget, go in order, lend each block once, and every request ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from draftline_server.core.block_pool import BlockPool
from draftline_server.core.request import Request
from draftline_server.core.scheduler import Scheduler, StepPlan
from support.requests import make_request

BLOCK_SIZE = 4


def make_scheduler(
    *, num_blocks: int = 64, max_running: int = 8, max_batched_tokens: int = 32, prefix_caching: bool = True
) -> Scheduler:
    pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_caching=prefix_caching)
    return Scheduler(pool=pool, max_running=max_running, max_batched_tokens=max_batched_tokens)


def apply(scheduler: Scheduler, plan: StepPlan, accepted: Mapping[str, int] | None = None) -> None:
    """Does to the requests what the engine does after a step, with `accepted` draft tokens each."""
    for item in plan.scheduled:
        request = item.request
        if item.samples:
            kept = min((accepted or {}).get(request.request_id, 0), item.draft_length)
            request.token_ids.extend([100 + request.num_output_tokens + i for i in range(kept + 1)])
            request.target_len = request.num_tokens - 1
        else:
            request.target_len += item.num_tokens
        scheduler.remember_full_blocks(request)


def lengths(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """(tokens, draft tokens) by request id, in the order of the plan."""
    return {s.request.request_id: (s.num_tokens, s.draft_length) for s in plan.scheduled}


def start(scheduler: Scheduler, *requests: Request) -> None:
    """Adds requests and steps until all of them decode."""
    for request in requests:
        scheduler.add(request)
    while not all(r.is_decoding and r.block_table for r in requests):
        apply(scheduler, scheduler.schedule({}))


def distinct_prompt(index: int, length: int) -> list[int]:
    return [1000 * (index + 1) + i for i in range(length)]


def test_nothing_to_do_gives_an_empty_plan() -> None:
    assert make_scheduler().schedule({}).scheduled == ()


def test_a_short_prompt_is_prefilled_in_one_step_and_then_decodes_one_token_at_a_time() -> None:
    scheduler = make_scheduler()
    request = make_request(prompt=range(6))
    scheduler.add(request)
    plan = scheduler.schedule({})
    assert lengths(plan) == {"r": (6, 0)}
    assert plan.scheduled[0].samples
    apply(scheduler, plan)
    assert lengths(scheduler.schedule({})) == {"r": (1, 0)}


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_only_in_the_last() -> None:
    scheduler = make_scheduler(max_batched_tokens=16)
    scheduler.add(make_request(prompt=range(40)))
    seen = []
    for _ in range(3):
        plan = scheduler.schedule({"r": 5})
        seen.append((plan.scheduled[0].num_tokens, plan.scheduled[0].samples))
        assert plan.scheduled[0].draft_length == 0, "an unfinished prefill has no draft"
        apply(scheduler, plan)
    assert seen == [(16, False), (16, False), (8, True)]


def test_decodes_come_before_prefill_and_keep_their_token_however_long_the_prompt() -> None:
    scheduler = make_scheduler(max_batched_tokens=16)
    start(scheduler, make_request("decoding", distinct_prompt(0, 5)))
    scheduler.add(make_request("urgent", distinct_prompt(1, 40), priority=9, sequence_number=1))
    plan = scheduler.schedule({})
    assert lengths(plan) == {"decoding": (1, 0), "urgent": (15, 0)}


def test_drafts_share_what_the_decodes_leave_of_the_budget() -> None:
    scheduler = make_scheduler(max_batched_tokens=16)
    requests = [make_request(f"r{i}", distinct_prompt(i, 5), sequence_number=i) for i in range(3)]
    start(scheduler, *requests)
    plan = scheduler.schedule({"r0": 5, "r1": 5, "r2": 5})
    assert lengths(plan) == {"r0": (1, 5), "r1": (1, 5), "r2": (1, 3)}
    assert plan.num_tokens == 16


def test_a_plan_has_slots_for_every_draft_token() -> None:
    scheduler = make_scheduler()
    request = make_request(prompt=range(4))
    start(scheduler, request)
    scheduler.schedule({"r": 9})
    assert len(request.block_table) * BLOCK_SIZE >= request.num_tokens + 9


def test_a_draft_is_dropped_where_its_blocks_are_missing() -> None:
    scheduler = make_scheduler(num_blocks=2)
    request = make_request(prompt=range(5))
    start(scheduler, request)
    assert lengths(scheduler.schedule({"r": 5})) == {"r": (1, 0)}
    assert lengths(scheduler.schedule({"r": 2})) == {"r": (1, 2)}, "this one fits the blocks it has"


def test_a_draft_never_takes_the_block_that_another_needs_for_its_next_token() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first = make_request("first", distinct_prompt(0, 4))
    second = make_request("second", distinct_prompt(1, 3), sequence_number=1)
    start(scheduler, first, second)
    apply(scheduler, scheduler.schedule({}))
    assert (first.num_tokens, second.num_tokens, scheduler.pool.num_available) == (6, 5, 1)
    plan = scheduler.schedule({"first": 5})
    assert lengths(plan) == {"first": (1, 0), "second": (1, 0)}
    assert scheduler.num_preemptions == 0


def test_a_draft_never_takes_the_block_that_a_running_prefill_needs() -> None:
    scheduler = make_scheduler(num_blocks=4, max_batched_tokens=8)
    decoding = make_request("decoding", distinct_prompt(0, 3))
    start(scheduler, decoding)
    scheduler.add(make_request("prefilling", distinct_prompt(1, 11), sequence_number=1))
    apply(scheduler, scheduler.schedule({}))
    assert (decoding.num_tokens, scheduler.pool.num_available) == (5, 1)
    decoding.token_ids.pop()  # one block is enough for what it has
    decoding.target_len -= 1
    plan = scheduler.schedule({"decoding": 3})
    assert lengths(plan) == {"decoding": (1, 0), "prefilling": (4, 0)}
    assert scheduler.num_preemptions == 0


def test_waiting_requests_start_by_priority_and_then_by_arrival() -> None:
    scheduler = make_scheduler(max_running=3)
    for index, priority in enumerate([0, 5, 0, 5]):
        scheduler.add(
            make_request(f"r{index}", distinct_prompt(index, 3), priority=priority, sequence_number=index)
        )
    assert [r.request_id for r in scheduler.waiting] == ["r1", "r3", "r0", "r2"]
    plan = scheduler.schedule({})
    assert list(lengths(plan)) == ["r1", "r3", "r0"]
    assert [r.request_id for r in scheduler.waiting] == ["r2"]


def test_a_waiting_request_of_higher_priority_goes_before_the_next_chunk_of_a_running_prompt() -> None:
    scheduler = make_scheduler(max_batched_tokens=16)
    long = make_request("long", distinct_prompt(0, 60))
    scheduler.add(long)
    apply(scheduler, scheduler.schedule({}))
    scheduler.add(make_request("later", distinct_prompt(1, 4), sequence_number=1))
    scheduler.add(make_request("urgent", distinct_prompt(2, 10), priority=10, sequence_number=2))
    plan = scheduler.schedule({})
    assert lengths(plan) == {"urgent": (10, 0), "long": (6, 0)}
    assert plan.num_tokens == 16
    apply(scheduler, plan)
    assert lengths(scheduler.schedule({})) == {"urgent": (1, 0), "long": (15, 0)}
    assert [r.request_id for r in scheduler.waiting] == ["later"]


def test_a_prompt_that_goes_on_behind_an_urgent_one_still_gets_its_blocks_or_waits() -> None:
    scheduler = make_scheduler(num_blocks=6, max_batched_tokens=8)
    long = make_request("long", distinct_prompt(0, 20))
    scheduler.add(long)
    apply(scheduler, scheduler.schedule({}))
    scheduler.add(make_request("urgent", distinct_prompt(1, 12), priority=1, sequence_number=1))
    seen: set[str] = set()
    for _ in range(40):
        plan = scheduler.schedule({})
        apply(scheduler, plan)
        scheduler.pool.check_integrity()
        for request in [r for r in scheduler.running if r.num_output_tokens >= 3]:
            seen.add(request.request_id)
            scheduler.remove(request)
    assert seen == {"long", "urgent"}
    assert scheduler.pool.num_held == 0


def test_the_blocks_of_drafts_that_did_not_stand_go_before_anyone_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first = make_request("first", distinct_prompt(0, 2))
    second = make_request("second", distinct_prompt(1, 2), sequence_number=1)
    start(scheduler, first, second)
    plan = scheduler.schedule({"second": 6})
    assert lengths(plan)["second"] == (1, 6)
    apply(scheduler, plan)  # none of it stands
    assert len(second.block_table) == 3
    while first.num_tokens < 6:
        apply(scheduler, scheduler.schedule({}))
    assert scheduler.num_preemptions == 0
    assert (len(first.block_table), len(second.block_table)) == (2, 2)
    scheduler.pool.check_integrity()


def test_a_plan_names_the_blocks_that_have_new_owners() -> None:
    scheduler = make_scheduler()
    request = make_request(prompt=distinct_prompt(0, 9))
    scheduler.add(request)
    plan = scheduler.schedule({})
    assert list(plan.fresh_blocks) == request.block_table
    apply(scheduler, plan)
    assert scheduler.schedule({}).fresh_blocks == ()
    again = make_request("again", distinct_prompt(0, 9), sequence_number=1)
    scheduler.add(again)
    plan = scheduler.schedule({})
    assert list(plan.fresh_blocks) == again.block_table[2:], "what the cache has is not to be cleared"


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=4)
    start(scheduler, make_request("running", distinct_prompt(0, 5)))
    scheduler.add(make_request("large", distinct_prompt(1, 12), sequence_number=1))
    scheduler.add(make_request("small", distinct_prompt(2, 2), sequence_number=2))
    assert list(lengths(scheduler.schedule({}))) == ["running"]
    assert [r.request_id for r in scheduler.waiting] == ["large", "small"]
    assert scheduler.waiting[0].block_table == [], "one that waits holds no block"


def test_when_blocks_run_out_the_last_in_order_loses_its_own_and_waits() -> None:
    scheduler = make_scheduler(num_blocks=3)
    urgent = make_request("urgent", distinct_prompt(0, 4), priority=1, sequence_number=1)
    other = make_request("other", distinct_prompt(1, 3))
    start(scheduler, other, urgent)
    while scheduler.num_preemptions == 0:
        plan = scheduler.schedule({})
        apply(scheduler, plan)
    assert "urgent" in lengths(plan)
    assert "other" not in lengths(plan)
    assert scheduler.waiting == (other,)
    assert (other.target_len, other.draft_len, other.block_table) == (0, 0, [])
    scheduler.remove(urgent)
    plan = scheduler.schedule({})
    assert list(lengths(plan)) == ["other"]
    assert plan.scheduled[0].num_tokens <= other.num_tokens


def test_a_preempted_request_starts_again_from_what_the_cache_still_has() -> None:
    scheduler = make_scheduler(num_blocks=8)
    request = make_request(prompt=range(11))
    start(scheduler, request)
    scheduler.remove(request)
    again = make_request("again", range(11))
    scheduler.add(again)
    plan = scheduler.schedule({})
    assert lengths(plan) == {"again": (3, 0)}
    assert again.num_cached_tokens == 8


def test_a_prompt_that_is_cached_as_a_whole_still_computes_its_newest_token() -> None:
    scheduler = make_scheduler()
    request = make_request(prompt=range(8))
    start(scheduler, request)
    scheduler.add(make_request("same", range(8), sequence_number=1))
    plan = scheduler.schedule({})
    assert lengths(plan)["same"] == (4, 0)
    assert plan.scheduled[-1].samples
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (16, 4)


def test_a_prefix_hit_says_how_far_the_draft_model_has_read() -> None:
    scheduler = make_scheduler()
    request = make_request(prompt=range(13))
    start(scheduler, request)
    request.draft_len = 9
    scheduler.remember_full_blocks(request)
    same = make_request("same", range(13), sequence_number=1)
    scheduler.add(same)
    scheduler.schedule({})
    assert (same.target_len, same.draft_len) == (12, 8)
    same.check_lengths()


def test_removing_a_request_frees_its_blocks_wherever_it_is() -> None:
    scheduler = make_scheduler(max_running=1)
    running, waiting = make_request("running", range(9)), make_request("waiting", range(9), sequence_number=1)
    start(scheduler, running)
    scheduler.add(waiting)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.pool.num_available == scheduler.pool.num_blocks


def test_drafts_cannot_keep_a_prompt_from_being_read() -> None:
    scheduler = make_scheduler(max_batched_tokens=16)
    decoding = [make_request(f"r{i}", distinct_prompt(i, 3), sequence_number=i) for i in range(3)]
    start(scheduler, *decoding)
    scheduler.add(make_request("new", distinct_prompt(7, 6), sequence_number=9))
    for _ in range(6):
        plan = scheduler.schedule(dict.fromkeys(("r0", "r1", "r2"), 5))
        apply(scheduler, plan)
        if "new" in lengths(plan):
            return
    pytest.fail("drafts took the whole budget of every step")


@dataclass
class _Simulation:
    """Random traffic against a scheduler, with every promise checked after every step."""

    rng: random.Random
    scheduler: Scheduler
    max_batched_tokens: int
    max_running: int
    requests: dict[str, Request] = field(default_factory=dict)
    num_added: int = 0

    def run(self, *, num_requests: int, longest: int) -> None:
        for _ in range(10_000):
            if self.num_added < num_requests and self.rng.random() < 0.3:
                self._add(longest)
            if self.requests and self.rng.random() < 0.02:
                self._end(self.rng.choice(list(self.requests)))
            if self.num_added == num_requests and not self.requests:
                return
            self._step()
        raise AssertionError(f"{len(self.requests)} requests never ended")

    def _add(self, longest: int) -> None:
        length = self.rng.randint(1, longest - 1)
        # Two families of prompts with common beginnings, so that prefixes are shared.
        family = self.rng.randrange(2)
        request = make_request(
            f"r{self.num_added}",
            [family * 1000 + i for i in range(length)],
            priority=self.rng.choice([0, 0, 0, 1]),
            sequence_number=self.num_added,
            max_tokens=self.rng.randint(1, longest - length),
        )
        self.num_added += 1
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def _end(self, request_id: str) -> None:
        self.scheduler.remove(self.requests.pop(request_id))

    def _step(self) -> None:
        wanted = {
            r.request_id: self.rng.randint(0, min(6, r.num_remaining_tokens - 1))
            for r in self.scheduler.running
            if r.is_decoding and self.rng.random() < 0.7
        }
        plan = self.scheduler.schedule(wanted)
        self._check(plan, wanted)
        for item in plan.scheduled:
            self._commit(item.request, item.num_tokens, item.draft_length, samples=item.samples)
        self.scheduler.pool.check_integrity()

    def _commit(self, request: Request, num_tokens: int, draft_length: int, *, samples: bool) -> None:
        if not samples:
            request.target_len += num_tokens
        else:
            kept = self.rng.randint(0, draft_length) + 1
            request.token_ids.extend(self.rng.randrange(50, 53) for _ in range(kept))
            request.target_len = request.num_tokens - 1
        if self.rng.random() < 0.5:
            request.draft_len = self.rng.randint(request.draft_len, request.target_len)
        request.check_lengths()
        self.scheduler.remember_full_blocks(request)
        assert request.num_remaining_tokens >= 0
        if request.num_remaining_tokens == 0:
            self._end(request.request_id)

    def _check(self, plan: StepPlan, wanted: Mapping[str, int]) -> None:
        scheduler = self.scheduler
        assert plan.num_tokens <= self.max_batched_tokens
        assert scheduler.num_running <= self.max_running
        assert plan.scheduled or not self.requests, "requests are there and nothing is done"
        planned = [s.request for s in plan.scheduled]
        assert len(set(planned)) == len(planned)
        assert set(planned) <= set(scheduler.running), "a request is planned that is not running"
        for item in plan.scheduled:
            request = item.request
            assert 1 <= item.num_tokens <= request.num_uncomputed_tokens
            assert item.draft_length <= wanted.get(request.request_id, 0)
            needed = request.target_len + item.num_tokens + item.draft_length
            assert len(request.block_table) * BLOCK_SIZE >= needed, "a token has no slot"
        self._check_order(scheduler.running)
        self._check_order(scheduler.waiting)
        if scheduler.running:
            assert scheduler.running[0] in planned, "the first in order stands still"
        assert all(not r.block_table and r.target_len == 0 for r in scheduler.waiting)
        self._check_blocks()

    @staticmethod
    def _check_order(requests: Sequence[Request]) -> None:
        keys = [r.scheduling_key for r in requests]
        assert keys == sorted(keys)

    def _check_blocks(self) -> None:
        """A block in two tables must be full, at the same place in both, and hold the same tokens."""
        running = self.scheduler.running
        uses = Counter(block_id for r in running for block_id in r.block_table)
        assert len(uses) == self.scheduler.pool.num_held
        contents: dict[int, tuple[int, ...]] = {}
        for request in running:
            for index, block_id in enumerate(request.block_table):
                if uses[block_id] > 1:
                    end = (index + 1) * BLOCK_SIZE
                    assert end <= request.target_len, "a shared block is going to be written"
                    prefix = tuple(request.token_ids[:end])
                    assert contents.setdefault(block_id, prefix) == prefix


@pytest.mark.parametrize("tightness", ["tight", "roomy"])
@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_ends_and_keeps_every_promise(seed: int, tightness: str) -> None:
    rng = random.Random(seed)
    longest = 40
    fewest = -(-longest // BLOCK_SIZE)  # one request of full length fits, and hardly more
    max_running = rng.randint(1, 8)
    max_batched_tokens = rng.randint(max_running, 24)
    scheduler = make_scheduler(
        num_blocks=fewest + rng.randint(0, 2) if tightness == "tight" else 8 * fewest,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        prefix_caching=rng.random() < 0.7,
    )
    simulation = _Simulation(rng, scheduler, max_batched_tokens, max_running)
    simulation.run(num_requests=40, longest=longest)
    assert scheduler.pool.num_available == scheduler.pool.num_blocks
    if tightness == "roomy":
        assert scheduler.num_preemptions == 0


def test_of_equal_requests_the_ones_that_came_first_end_first_even_in_a_tiny_pool() -> None:
    scheduler = make_scheduler(num_blocks=7, prefix_caching=False)
    requests = [
        make_request(f"r{i}", distinct_prompt(i, 8), sequence_number=i, max_tokens=12) for i in range(6)
    ]
    for request in requests:
        scheduler.add(request)
    ended: list[str] = []
    for _ in range(2_000):
        apply(scheduler, scheduler.schedule({}))
        for request in scheduler.running:
            if request.num_remaining_tokens == 0:
                scheduler.remove(request)
                ended.append(request.request_id)
        if len(ended) == len(requests):
            break
    assert ended == [r.request_id for r in requests]
    assert scheduler.num_preemptions > 0, "the pool was meant to be too small"
