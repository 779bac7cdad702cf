"""One of several operators leads, and none for a moment longer than it can be sure of that."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from draftline_operator.errors import ClusterError
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.models.kinds import CONFIG_MAP
from draftline_operator.services import leader as module
from draftline_operator.services.fence import FencedCluster
from draftline_operator.services.leader import LEASE_SECONDS, Leadership, LeaseIdentity, LeaseLost
from support.object_store import ObjectStore

LEASE = ("Lease", "draftline", "draftline-operator")
WRITES_FOR = 0.6 * LEASE_SECONDS
START = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)


class Clock:
    """Of one process. Only tests let time pass, but for the moments between two tries."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def date(self) -> datetime.datetime:
        return START + datetime.timedelta(seconds=self.now)


@pytest.fixture(autouse=True)
def _tries_follow_each_other_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY", 0.01 / LEASE_SECONDS)


def leadership(store: ObjectStore, clock: Clock, holder: str = "a") -> Leadership:
    identity = LeaseIdentity(namespace=LEASE[1], name=LEASE[2], holder=holder)
    return Leadership(store, identity, monotonic=clock, now=clock.date)


async def acquire(candidate: Leadership) -> None:
    async with asyncio.timeout(5):
        await candidate.acquire()


async def is_left_waiting(candidate: Leadership) -> bool:
    """Whether it does not get it in the time of a few tries."""
    try:
        async with asyncio.timeout(0.1):
            await candidate.acquire()
    except TimeoutError:
        return True
    return False


@asynccontextmanager
async def holding(leader: Leadership) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(leader.hold())
    yield task
    task.cancel()
    await asyncio.wait([task])


def holder_of(store: ObjectStore) -> str:
    return str(store.objects[LEASE]["spec"]["holderIdentity"])


async def test_a_lease_that_nobody_has_is_taken() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    assert not leader.is_leader()
    await acquire(leader)
    assert leader.is_leader()
    assert holder_of(store) == "a"
    assert store.objects[LEASE]["spec"]["leaseDurationSeconds"] == LEASE_SECONDS


async def test_a_leader_may_write_until_well_before_others_may_take_the_lease() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    await acquire(leader)
    clock.now += WRITES_FOR - 0.01
    assert leader.is_leader()
    clock.now += 0.02
    assert not leader.is_leader(), "nobody needs to have said so"


async def test_what_counts_is_when_a_renewal_began() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    await acquire(leader)

    def take_long() -> bool:
        clock.now += WRITES_FOR - 0.01
        return True

    original = store.replace

    async def slow_replace(manifest: dict[str, object]) -> dict[str, object]:
        take_long()
        return await original(manifest)

    store.replace = slow_replace  # type: ignore[method-assign]
    await acquire(leader)
    assert leader.is_leader()
    clock.now += 0.02
    assert not leader.is_leader()


async def test_of_two_that_want_it_at_once_one_gets_it() -> None:
    store, clock = ObjectStore(), Clock()
    first, second = leadership(store, clock), leadership(store, clock, "b")
    await acquire(first)
    assert await is_left_waiting(second)
    assert not second.is_leader()
    assert holder_of(store) == "a"


async def test_a_lease_is_taken_after_it_was_seen_unchanged_for_its_time_and_not_before() -> None:
    store, clock = ObjectStore(), Clock()
    await acquire(leadership(store, clock))
    second = leadership(store, clock, "b")
    assert await is_left_waiting(second)
    clock.now += LEASE_SECONDS
    assert await is_left_waiting(second)
    clock.now += 0.01
    await acquire(second)
    assert holder_of(store) == "b"
    assert store.objects[LEASE]["spec"]["leaseTransitions"] == 1


async def test_a_lease_that_is_renewed_is_not_taken_whatever_time_it_says() -> None:
    store, clock = ObjectStore(), Clock()
    first, second = leadership(store, clock), leadership(store, clock, "b")
    await acquire(first)
    store.objects[LEASE]["spec"]["renewTime"] = "2000-01-01T00:00:00.000000Z"
    for _ in range(3):
        assert await is_left_waiting(second)
        clock.now += LEASE_SECONDS - 1
        store.put(store.objects[LEASE])
    assert await is_left_waiting(second)


async def test_a_leader_renews_and_goes_on() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    await acquire(leader)
    async with holding(leader) as task:
        for _ in range(5):
            clock.now += WRITES_FOR - 1
            await asyncio.sleep(0.05)
            assert leader.is_leader()
        assert not task.done()


async def test_a_leader_that_cannot_renew_ends() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    await acquire(leader)
    async with holding(leader) as task:
        store.is_reachable = False
        await asyncio.sleep(0.05)
        assert not task.done(), "a try that fails is not the end"
        clock.now += WRITES_FOR
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(task, 5)
    assert not leader.is_leader()


async def test_a_leader_whose_lease_somebody_has_taken_ends() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    await acquire(leader)
    lease = store.objects[LEASE]
    store.put({**lease, "spec": {**lease["spec"], "holderIdentity": "b"}})
    async with holding(leader) as task:
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(task, 5)
    assert not leader.is_leader()
    assert holder_of(store) == "b"


async def test_a_leader_that_leaves_lets_the_next_one_in_at_once() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    await acquire(leader)
    await leader.release()
    assert not leader.is_leader()
    assert holder_of(store) == ""
    await acquire(leadership(store, clock, "b"))


async def test_nobody_gives_away_what_is_another_ones() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    await acquire(leader)
    lease = store.objects[LEASE]
    store.put({**lease, "spec": {**lease["spec"], "holderIdentity": "b"}})
    await leader.release()
    assert holder_of(store) == "b"
    clock.now += WRITES_FOR
    await leadership(store, clock, "c").release()
    assert holder_of(store) == "b"


async def test_an_api_server_that_is_away_does_not_keep_anybody_from_leaving() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    await acquire(leader)
    store.is_reachable = False
    await leader.release()
    assert not leader.is_leader()


async def test_a_process_that_was_asleep_writes_nothing_when_it_wakes() -> None:
    store, clock = ObjectStore(), Clock()
    leader = leadership(store, clock)
    cluster = FencedCluster(store, leader.is_leader, OperatorMetrics())
    await acquire(leader)
    metadata = {"namespace": "models", "name": "a"}
    await cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    clock.now += WRITES_FOR
    with pytest.raises(ClusterError, match="does not lead"):
        await cluster.delete(CONFIG_MAP, "models", "a")
    assert await cluster.get(CONFIG_MAP, "models", "a") is not None
