"""What others do while the operator looks at a resource is neither undone nor misreported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from draftline_operator.cluster.client import ClusterClient
from draftline_operator.cluster.forwarding import ForwardingCluster
from draftline_operator.cluster.interface import Cluster, Subresource
from draftline_operator.constants import FIELD_MANAGER, REVISION_LABEL
from draftline_operator.errors import ConflictError
from draftline_operator.models.kinds import CONFIG_MAP, DEPLOYMENT, JOB, SPECULATIVE_DEPLOYMENT, Kind
from draftline_operator.models.names import pair_record_name
from draftline_operator.models.observed import Object
from draftline_operator.resources.pair_record import render_pair_owner
from draftline_operator.services.pair_records import PairClaims
from draftline_operator.services.reconcile import reconcile
from support.operator_world import NAME, World
from support.speculative_deployments import PAIR, resource

Act = Callable[[], Awaitable[Any]]


class Interrupted(ForwardingCluster):
    """Somebody acts once in the middle."""

    def __init__(self, cluster: Cluster, act: Act) -> None:
        super().__init__(cluster)
        self._acts = [act]

    async def _interrupt(self) -> None:
        if self._acts:
            await self._acts.pop()()


class BeforeStatus(Interrupted):
    """Just before a status is written."""

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: Subresource | None = None,
    ) -> Object | None:
        if subresource == "status":
            await self._interrupt()
        return await super().patch(kind, namespace, name, change, subresource=subresource)


class AfterJobs(Interrupted):
    """Just after the Jobs were listed."""

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> list[Object]:
        found = await super().list(kind, namespace, labels=labels, is_cached=is_cached)
        if kind == JOB:
            await self._interrupt()
        return found


async def recreate(world: World) -> None:
    """A namesake, made as soon as that may be."""
    await world.delete()

    async def is_gone() -> bool:
        return await world.get(SPECULATIVE_DEPLOYMENT) is None

    await world.until(is_gone)
    await world.create()


async def change(world: World) -> None:
    await world.change({"image": "registry.test/server:2"})


@pytest.mark.parametrize("act", [recreate, change])
async def test_what_was_found_out_is_not_told_of_a_later_resource(
    world: World, act: Callable[[World], Awaitable[None]]
) -> None:
    await world.create()
    cluster = BeforeStatus(world.client, lambda: act(world))
    outcome = await reconcile(world.namespace, NAME, world.surroundings(cluster))
    assert await world.status() == {}
    assert outcome.requeue_after == 0
    await world.settle(seconds=60)
    body = await world.existing(SPECULATIVE_DEPLOYMENT)
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"]


async def test_no_pods_are_lost_where_more_are_wanted_again_before_they_go(world: World) -> None:
    await world.create({**PAIR, "replicas": 3})
    await world.settle()
    await world.scale(1)

    async def scale_out(seconds: float) -> None:
        await world.scale(4)

    surroundings = replace(world.surroundings(world.client), sleep=scale_out)
    world.loads.by_pod = {pod["metadata"]["name"]: 3 for pod in await world.pods()}
    await reconcile(world.namespace, NAME, surroundings)
    assert (await world.existing(DEPLOYMENT))["spec"]["replicas"] == 3
    await world.settle()
    assert (await world.existing(DEPLOYMENT))["spec"]["replicas"] == 4


async def test_the_surge_of_a_rollout_is_not_told_to_an_autoscaler(world: World) -> None:
    await world.create({**PAIR, "replicas": 2})
    await world.settle()
    await change(world)
    most = 0
    for _ in range(20):
        await world.reconcile()
        live = await world.existing(DEPLOYMENT)
        most = max(most, live["status"].get("replicas", 0))
        assert (await world.status())["replicas"] <= 2
        await world.kubelet.step()
    await world.settle()
    assert most == 3, "there was no surge"
    assert (await world.status())["replicas"] == 2


# -------------------------------------------------------------------------------- resources that share a pair


async def test_two_resources_that_look_at_the_same_time_make_one_job(world: World) -> None:
    await world.create()
    await world.create(name="second")
    claims = PairClaims()

    async def look(name: str, cluster: Cluster) -> None:
        await reconcile(world.namespace, name, replace(world.surroundings(cluster), claims=claims))

    await look("second", AfterJobs(world.client, lambda: look(NAME, world.client)))
    (job,) = await world.client.list(JOB, world.namespace)
    assert job["metadata"]["name"].startswith(f"{NAME}-")
    await world.settle(NAME, "second")
    assert (await world.conditions("second"))["Ready"][0] == "True"


async def record_of(world: World) -> Object:
    template = (await world.existing(DEPLOYMENT))["spec"]["template"]
    revision = template["metadata"]["labels"][REVISION_LABEL]
    return await world.existing(CONFIG_MAP, pair_record_name(revision))


async def test_owners_that_come_and_go_leave_nothing_in_the_record_of_their_pair(world: World) -> None:
    await world.create()
    await world.settle()
    before = await record_of(world)
    for number in range(2):
        name = f"passing-{number}"
        uid = (await world.create(name=name))["metadata"]["uid"]
        await world.settle(NAME, name)
        managers = {entry["manager"] for entry in (await record_of(world))["metadata"]["managedFields"]}
        assert managers == {FIELD_MANAGER, f"{FIELD_MANAGER}-{uid}"}
        await world.delete(name=name)

        async def is_no_owner() -> bool:
            return len((await record_of(world))["metadata"]["ownerReferences"]) == 1

        await world.until(is_no_owner, seconds=30)
    after = await record_of(world)
    assert after["data"] == before["data"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    assert [entry["manager"] for entry in after["metadata"]["managedFields"]] == [FIELD_MANAGER]


async def test_an_owner_does_not_make_a_record_that_is_gone(client: ClusterClient, world: World) -> None:
    owner = replace(resource(PAIR), namespace=world.namespace)
    with pytest.raises(ConflictError):
        await client.apply(render_pair_owner(owner, "0123abcd", uid="gone"), field_manager="owner")
    assert await world.get(CONFIG_MAP, pair_record_name("0123abcd")) is None
