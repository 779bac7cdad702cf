"""The process: it acts on events, may be restarted at any time, and waits for a cluster that is away."""

from __future__ import annotations

import asyncio

import pytest

from draftline_operator.models.kinds import DEPLOYMENT, LEASE, SERVICE
from support.kube.local import LocalCluster
from support.operator_process import OperatorProcess
from support.operator_world import NAME, World
from support.operators import LEASE_NAME, Operators, wait_until_it_leads
from support.speculative_deployments import AUTOSCALED

pytestmark = pytest.mark.usefixtures("kubelet_runs")


async def test_it_brings_a_resource_up_and_ends_when_it_is_told_to(
    world: World, operators: Operators
) -> None:
    with operators.start() as operator:
        await world.create(AUTOSCALED)
        await world.until(world.is_ready, seconds=30)
        assert await asyncio.to_thread(operator.fetch, "/healthz") == "ok\n"
        assert await asyncio.to_thread(operator.fetch, "/readyz") == "ok\n"
        assert await asyncio.to_thread(operator.stop) == 0
    lease = await world.existing(LEASE, LEASE_NAME)
    assert lease["spec"]["holderIdentity"] == "", "the next one need not wait"


async def test_what_happens_to_a_child_is_seen_at_once(world: World, operators: Operators) -> None:
    with operators.start():
        await world.create()
        await world.until(world.is_ready, seconds=30)
        await world.client.delete(SERVICE, world.namespace, NAME)

        async def is_back() -> bool:
            return await world.get(SERVICE) is not None

        await world.until(is_back, seconds=5)


async def test_a_spec_that_is_put_right_is_picked_up_without_a_restart(
    world: World, operators: Operators
) -> None:
    with operators.start():
        await world.create({"target": {"model": {"uri": "file:///models/target"}}})

        async def is_invalid() -> bool:
            return (await world.conditions()).get("Ready") == ("False", "InvalidSpec")

        await world.until(is_invalid, seconds=30)
        await world.change({"target": {"model": {"uri": "pvc://models/target"}}})
        await world.until(world.is_ready, seconds=30)


async def test_a_restart_rolls_nothing(world: World, operators: Operators) -> None:
    names = [f"chat-{number}" for number in range(5)]
    for name in names:
        await world.create(name=name)
    with operators.start() as operator:
        for name in names:
            await world.until(lambda name=name: world.is_ready(name), seconds=60)  # type: ignore[misc]
        await asyncio.to_thread(operator.stop)
    before = [(await world.existing(DEPLOYMENT, name))["metadata"] for name in names]
    for number in range(3):
        with operators.start(f"again-{number}") as operator:
            await wait_until_it_leads(operator)
            await world.until(lambda operator=operator: _has_looked_at(len(names), operator), seconds=30)  # type: ignore[misc]
            await asyncio.sleep(3)  # for what it might do after the first look
            assert await asyncio.to_thread(operator.writes) == 0
            await asyncio.to_thread(operator.stop)
    after = [(await world.existing(DEPLOYMENT, name))["metadata"] for name in names]
    assert [m["generation"] for m in after] == [m["generation"] for m in before]


async def _has_looked_at(number: int, operator: OperatorProcess) -> bool:
    return await asyncio.to_thread(operator.reconciles) >= number


@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.slow)])
async def test_what_happened_while_the_api_server_was_away_is_not_lost(
    world: World, operators: Operators, local_control_plane: LocalCluster, seconds: int
) -> None:
    await world.create()
    with operators.start("before"):
        await world.until(world.is_ready, seconds=30)
    with operators.start("during") as operator:
        await wait_until_it_leads(operator)
        await asyncio.to_thread(local_control_plane.kill, "kube-apiserver")
        code = await asyncio.to_thread(operator.process.wait, 30)
        assert code == 1, "without a renewal it stops acting"
        with operators.start("waiting") as waiting:
            await asyncio.sleep(seconds)
            assert waiting.process.poll() is None, "it waits for the cluster"
            await asyncio.to_thread(local_control_plane.start, "kube-apiserver")
            await world.change({"replicas": 2})
            await world.until(world.is_ready, seconds=60)
            assert (await world.status())["readyReplicas"] == 2
