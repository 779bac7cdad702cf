"""Replicas belong to whoever writes the resource's own figure; pods that leave are the idlest."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.models.kinds import DEPLOYMENT, POD, SPECULATIVE_DEPLOYMENT
from draftline_operator.models.observed import Object
from support.operator_world import NAME, World
from support.speculative_deployments import AUTOSCALED, PAIR


async def replicas(world: World) -> int:
    return int((await world.existing(DEPLOYMENT))["spec"]["replicas"])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"spec": {"image": "registry.test/server:2"}}, id="image"),
        pytest.param({"spec": {"podTemplate": {"env": [{"name": "A", "value": "1"}]}}}, id="env"),
        pytest.param({"metadata": {"labels": {"team": "a"}}}, id="label"),
    ],
)
async def test_replicas_of_the_autoscaler_survive_a_change_of_the_resource(
    world: World, change: dict[str, Any]
) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    await world.scale(3)
    await world.settle()
    await world.client.patch(SPECULATIVE_DEPLOYMENT, world.namespace, NAME, change)
    await world.settle()
    assert await replicas(world) == 3
    assert (await world.existing(SPECULATIVE_DEPLOYMENT))["spec"]["replicas"] == 3


async def test_replicas_survive_a_replacement_of_the_resource_that_leaves_them_out(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    await world.scale(3)
    await world.settle()
    body = await world.existing(SPECULATIVE_DEPLOYMENT)
    del body["spec"]["replicas"]
    await world.client.replace(body)
    await world.settle()
    assert await replicas(world) == 3
    assert (await world.existing(SPECULATIVE_DEPLOYMENT))["spec"]["replicas"] == 3


async def test_a_resource_without_replicas_can_be_scaled(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.reconcile()
    scale = await world.client.get(SPECULATIVE_DEPLOYMENT, world.namespace, NAME)
    assert scale is not None
    assert scale["spec"]["replicas"] == 1
    await world.scale(2)
    await world.settle()
    assert await replicas(world) == 2


async def test_a_change_of_the_spec_never_asks_for_fewer_pods_on_the_way(world: World) -> None:
    await world.create({**PAIR, "autoscaling": {"minReplicas": 4, "maxReplicas": 8}})
    await world.settle()
    assert await replicas(world) == 4
    await world.change({"image": "registry.test/server:2"})
    seen: list[Object] = []
    for _ in range(20):
        await world.reconcile()
        deployment = await world.existing(DEPLOYMENT)
        seen.append(deployment)
        assert deployment["spec"]["replicas"] == 4
        assert deployment["status"].get("availableReplicas", 0) >= 4
        assert (await world.conditions())["Available"][0] == "True"
        await world.kubelet.step()
    await world.settle()
    assert seen[0]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert (await world.conditions())["Progressing"] == ("False", "RolledOut")


async def test_zero_is_zero_and_no_failure(world: World) -> None:
    await world.create({**PAIR, "replicas": 0})
    await world.settle()
    assert await replicas(world) == 0
    conditions = await world.conditions()
    assert conditions["Ready"] == ("True", "ScaledToZero")
    assert conditions["Degraded"][0] == "False"


async def test_a_scale_in_takes_the_idlest_pods(world: World) -> None:
    await world.create({**PAIR, "replicas": 4})
    await world.settle()
    names = sorted(pod["metadata"]["name"] for pod in await world.pods())
    world.loads.by_pod = dict(zip(names, (9, 1, 5, 2), strict=True))
    await world.scale(2)
    await world.settle()
    left = {pod["metadata"]["name"] for pod in await world.pods(POD)}
    assert left == {names[0], names[2]}


async def test_costs_are_told_before_replicas_are_lowered(world: World) -> None:
    await world.create({**PAIR, "replicas": 2})
    await world.settle()
    world.loads.by_pod = {pod["metadata"]["name"]: 3 for pod in await world.pods()}
    await world.scale(1)
    _, writes = await world.reconcile()
    kinds = [kind for _, kind, _ in writes]
    assert kinds.index("Pod") < kinds.index("Deployment")
    _, again = await world.reconcile()
    assert not [write for write in again if write[1] == "Pod"]


async def test_replicas_that_somebody_wrote_into_the_deployment_are_put_right(world: World) -> None:
    await world.create({**PAIR, "replicas": 2})
    await world.settle()
    await world.client.patch(DEPLOYMENT, world.namespace, NAME, {"spec": {"replicas": 5}})
    await world.settle()
    assert await replicas(world) == 2
