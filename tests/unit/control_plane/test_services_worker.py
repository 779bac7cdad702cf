"""A resource waits once, runs once at a time, and keeps its failures to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from draftline_operator.errors import ClusterError, ForbiddenError
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.services.reconcile import Outcome
from draftline_operator.services.worker import (
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    MIN_INTERVAL_SECONDS,
    Key,
    WorkQueue,
    work,
)

A, B = ("models", "a"), ("models", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(clock)


async def take(queue: WorkQueue) -> Key | None:
    """What is due at this moment."""
    try:
        async with asyncio.timeout(0.01):
            return await queue.take()
    except TimeoutError:
        return None


async def test_a_resource_that_is_put_in_often_is_taken_once(queue: WorkQueue) -> None:
    for _ in range(5):
        queue.add(A)
    assert len(queue) == 1
    assert await take(queue) == A
    assert await take(queue) is None


async def test_a_resource_that_runs_is_not_taken_again_before_it_was_given_back(
    queue: WorkQueue, clock: Clock
) -> None:
    queue.add(A)
    await take(queue)
    queue.add(A)
    assert await take(queue) is None
    queue.give_back(A)
    clock.now += MIN_INTERVAL_SECONDS
    assert await take(queue) == A


async def test_a_burst_of_events_during_a_reconcile_is_one_more_reconcile(
    queue: WorkQueue, clock: Clock
) -> None:
    queue.add(A)
    await take(queue)
    for _ in range(9):
        queue.add(A)
    queue.give_back(A)
    clock.now += 1
    assert await take(queue) == A
    queue.give_back(A)
    clock.now += 1
    assert await take(queue) is None


async def test_others_are_taken_while_one_runs(queue: WorkQueue) -> None:
    queue.add(A)
    queue.add(B)
    assert {await take(queue), await take(queue)} == {A, B}


async def test_the_sooner_of_two_times_counts(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A, after=60)
    queue.add(A, after=5)
    queue.add(A, after=30)
    assert await take(queue) is None
    clock.now += 5
    assert await take(queue) == A


async def test_a_failing_resource_is_retried_ever_more_seldom(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A)
    waits = []
    for _ in range(10):
        assert await take(queue) == A
        waits.append(queue.give_back_failed(A))
        assert await take(queue) is None
        clock.now += waits[-1] + 0.001
    assert FIRST_RETRY_SECONDS * 0.8 <= waits[0] <= FIRST_RETRY_SECONDS * 1.2
    assert all(wait <= LAST_RETRY_SECONDS * 1.2 for wait in waits)
    assert waits[-1] >= LAST_RETRY_SECONDS * 0.8


async def test_events_do_not_make_a_failing_resource_hot(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A)
    await take(queue)
    queue.add(A)
    wait = queue.give_back_failed(A)
    queue.add(A)
    clock.now += wait / 2
    assert await take(queue) is None


async def test_a_success_forgets_the_failures(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A)
    for _ in range(6):
        await take(queue)
        clock.now += queue.give_back_failed(A) + 0.001
    await take(queue)
    queue.give_back(A)
    clock.now += 1
    queue.add(A)
    await take(queue)
    assert queue.give_back_failed(A) <= FIRST_RETRY_SECONDS * 1.2


async def test_a_resource_that_is_gone_is_forgotten(queue: WorkQueue) -> None:
    queue.add(A)
    await take(queue)
    queue.give_back(A, is_gone=True)
    queue.add_namespace("models")
    assert len(queue) == 0


async def test_all_known_resources_of_a_namespace_can_be_put_in(queue: WorkQueue, clock: Clock) -> None:
    for key in (A, B, ("other", "c")):
        queue.add(key)
        await take(queue)
        queue.give_back(key)
    clock.now += 1
    queue.add_namespace("models")
    assert len(queue) == 2


Reconcile = Callable[[str, str, int], Coroutine[Any, Any, Outcome]]


async def run_for_a_moment(queue: WorkQueue, reconcile: Reconcile) -> str:
    """Reconciles with two tasks, and returns the metrics."""
    metrics = OperatorMetrics()
    task = asyncio.create_task(work(queue, reconcile, metrics, tasks=2))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return metrics.render().decode()


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        pytest.param(ClusterError("away"), "ClusterError", id="cluster"),
        pytest.param(ForbiddenError("no"), "ForbiddenError", id="forbidden"),
        pytest.param(KeyError("spec"), "bug", id="bug"),
    ],
)
async def test_whatever_fails_is_counted_and_does_not_hold_up_others(error: Exception, counted: str) -> None:
    queue = WorkQueue(asyncio.get_running_loop().time)
    done: list[str] = []

    async def reconcile(namespace: str, name: str, failures: int) -> Outcome:
        if name == "a":
            raise error
        done.append(name)
        return Outcome()

    queue.add(A)
    queue.add(B)
    text = await run_for_a_moment(queue, reconcile)
    assert done == ["b"]
    assert f'draftline_operator_reconciles_total{{outcome="{counted}"}} 1.0' in text
    assert 'draftline_operator_reconciles_total{outcome="ok"} 1.0' in text


async def test_a_resource_comes_back_when_it_asked_to() -> None:
    queue = WorkQueue(asyncio.get_running_loop().time)
    calls: list[str] = []

    async def reconcile(namespace: str, name: str, failures: int) -> Outcome:
        calls.append(name)
        return Outcome(requeue_after=60.0)

    queue.add(A)
    await run_for_a_moment(queue, reconcile)
    assert calls == ["a"]
    assert len(queue) == 1
