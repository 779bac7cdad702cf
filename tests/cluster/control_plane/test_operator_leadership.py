"""Of several operators one acts: also where the one that did was killed, or frozen in the middle of its work.

What each of them wrote, and when, is what the API server's audit log says.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import urllib.error
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from draftline_operator.constants import POD_DELETION_COST_ANNOTATION
from draftline_operator.models.kinds import DEPLOYMENT
from support.audit_log import Request, first
from support.operator_process import OperatorProcess
from support.operator_world import NAME, World
from support.operators import Operators, wait_until_it_leads
from support.speculative_deployments import PAIR

CROWD = 10
"""Resources that are brought up at once: each takes more than a dozen writes."""
LEASE_SECONDS = 6
"""Of operators that have so much to do: on a busy machine a shorter Lease is lost without any freezing."""

pytestmark = pytest.mark.usefixtures("kubelet_runs")


async def answers(operator: OperatorProcess, path: str) -> bool:
    with contextlib.suppress(urllib.error.HTTPError):
        return await asyncio.to_thread(operator.fetch, path) == "ok\n"
    return False


@dataclass(frozen=True)
class Rivals:
    """Two operators, of which one leads."""

    operators: Operators
    leading: str
    standby: str
    leader: OperatorProcess
    successor: OperatorProcess

    async def wait_for_writes(self, number: int) -> None:
        """Of the leader."""
        while await asyncio.to_thread(self.leader.writes) < number:  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(0.02)

    def freeze_leader(self) -> None:
        self.leader.process.send_signal(signal.SIGSTOP)

    async def wake_leader(self) -> None:
        """It has to end by itself, to be started again as a standby."""
        self.leader.process.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(self.leader.process.wait, 30) == 1

    async def has_successor_written(self) -> bool:
        return await asyncio.to_thread(self.successor.writes) > 0

    def late_writes(self) -> list[Request]:
        """Of the old leader, after the first one of the new."""
        began = first(self.operators.writes(self.standby))
        return [write for write in self.operators.writes(self.leading) if write.began > began]


@contextlib.asynccontextmanager
async def rivals(operators: Operators, suffix: str = "") -> AsyncIterator[Rivals]:
    one, other = f"first{suffix}", f"second{suffix}"
    with (
        operators.start(one, lease_seconds=LEASE_SECONDS) as process,
        operators.start(other, lease_seconds=LEASE_SECONDS) as other_process,
    ):
        leading = await operators.leader(one, other)
        order = {one: process, other: other_process}
        standby = other if leading == one else one
        yield Rivals(operators, leading, standby, order[leading], order[standby])


async def test_of_two_operators_one_acts_and_the_other_takes_over_when_it_is_killed(
    world: World, operators: Operators
) -> None:
    with operators.start("first") as first:
        await wait_until_it_leads(first)
        with operators.start("second") as second:
            await world.create()
            await world.until(world.is_ready, seconds=30)
            assert operators.writes("second") == []
            await world.until(lambda: answers(second, "/readyz"))
            first.kill()
            await world.create(name="later")
            await world.until(lambda: world.is_ready("later"), seconds=30)


async def test_an_operator_that_was_asleep_writes_nothing_when_it_wakes(
    world: World, operators: Operators
) -> None:
    async with rivals(operators) as both:
        await world.create()
        await world.until(world.is_ready, seconds=30)
        both.freeze_leader()
        await world.change({"serving": {"maxQueueLength": 9}})
        await world.until(world.is_ready, seconds=30)
        await both.wake_leader()
        assert both.late_writes() == []


async def test_what_was_decided_before_a_sleep_is_not_written_after_it(
    world: World, operators: Operators
) -> None:
    """A scale-in: pods were told their costs, and the fewer replicas were about to follow."""
    await world.create({**PAIR, "replicas": 3})
    async with rivals(operators) as both:
        await world.until(world.is_ready, seconds=30)
        await world.scale(1)
        await world.until(lambda: have_costs(world))
        both.freeze_leader()
        assert await replicas(world) == 3, "it was frozen too late"
        await world.scale(4)
        await world.until(lambda: has_replicas(world, 4), seconds=30)
        await both.wake_leader()
        assert both.late_writes() == []
        assert await replicas(world) == 4


@pytest.mark.parametrize("times", [2, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_an_operator_that_is_frozen_in_the_middle_of_its_work_does_not_go_on_with_it(
    world: World, operators: Operators, times: int
) -> None:
    """It wakes as soon as another one has begun to do the same work, of which most is left."""
    generator = random.Random(4)
    for number in range(times):
        names = [f"chat-{number}-{index}" for index in range(CROWD)]
        async with rivals(operators, f"-{number}") as both:
            for name in names:
                await world.create({**PAIR, "target": {"model": {"uri": f"pvc://{name}"}}}, name=name)
            await both.wait_for_writes(generator.randint(1, 5 * CROWD))
            await asyncio.sleep(generator.uniform(0, 0.1))
            both.freeze_leader()
            await world.until(both.has_successor_written, seconds=30)
            await both.wake_leader()
            for name in names:
                await world.until(lambda name=name: world.is_ready(name), seconds=60)  # type: ignore[misc]
            assert both.late_writes() == []
        for name in names:
            await world.delete(name=name)


async def have_costs(world: World) -> bool:
    annotations = [pod["metadata"].get("annotations", {}) for pod in await world.pods()]
    return all(POD_DELETION_COST_ANNOTATION in found for found in annotations)


async def replicas(world: World) -> int:
    return int((await world.existing(DEPLOYMENT, NAME))["spec"]["replicas"])


async def has_replicas(world: World, number: int) -> bool:
    return await replicas(world) == number
