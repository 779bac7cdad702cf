"""What goes as a whole, a namespace or the operator, goes without getting stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftline_operator.cluster.client import ClusterClient
from draftline_operator.models.kinds import DEPLOYMENT, SERVICE, SPECULATIVE_DEPLOYMENT
from support.installed_operator import installed_operator
from support.kube.cluster import Cluster
from support.kube.local import LocalCluster
from support.kubelet import Kubelet
from support.made_objects import made_objects
from support.operator_process import running_operator
from support.operator_world import NAME, World
from support.release import CRD, release_of
from support.speculative_deployments import PAIR

OTHERS = ("summary", "translation")
AUTOSCALED: dict[str, Any] = {**PAIR, "autoscaling": {"minReplicas": 2, "maxReplicas": 5}}


async def is_ready(world: World, name: str = NAME) -> bool:
    return (await world.conditions(name)).get("Ready", ("", ""))[0] == "True"


async def delete_namespace(world: World, cluster: Cluster, *, seconds: int = 60) -> None:
    """Raises where it is still there after so long."""
    command = ("delete", "namespace", world.namespace, f"--timeout={seconds}s")
    await asyncio.to_thread(cluster.kubectl, *command)


async def test_a_namespace_goes_with_its_resources_while_no_operator_runs(
    world: World, control_plane: Cluster
) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    await delete_namespace(world, control_plane)


@pytest.mark.usefixtures("kubelet_runs")
async def test_a_namespace_goes_with_its_resources_and_the_operators_lease(
    world: World, control_plane: Cluster, tmp_path: Path
) -> None:
    with running_operator(control_plane.kubeconfig, world.namespace, tmp_path / "log"):
        for name in (NAME, *OTHERS):
            await world.create(AUTOSCALED, name=name)
        for name in (NAME, *OTHERS):
            await world.until(lambda name=name: is_ready(world, name), seconds=30)  # type: ignore[misc]
        await delete_namespace(world, control_plane)


@pytest.mark.usefixtures("kubelet_runs")
async def test_a_namespace_goes_while_resources_are_being_brought_up(
    world: World, control_plane: Cluster, tmp_path: Path
) -> None:
    with running_operator(control_plane.kubeconfig, world.namespace, tmp_path / "log") as operator:
        await asyncio.to_thread(operator.wait_for, "became the leader")
        for name in (NAME, *OTHERS):
            await world.create(AUTOSCALED, name=name)
        await asyncio.to_thread(operator.wait_for, "applied a child")
        await delete_namespace(world, control_plane)


@pytest.mark.usefixtures("kubelet_runs")
async def test_what_an_uninstalled_release_leaves_serves_on_and_is_taken_up_by_the_next(
    world: World, local_control_plane: LocalCluster, tmp_path: Path
) -> None:
    control_plane = local_control_plane
    values = {"autoscaling": {"provider": "none"}}

    def start(release: Any, name: str) -> Any:
        return installed_operator(control_plane, release, tmp_path / name)

    with release_of(control_plane) as first:
        first.install(values)
        with start(first, "first") as operator:
            await world.create(PAIR)
            await world.until(lambda: is_ready(world), seconds=30)
            await asyncio.to_thread(operator.stop)
        before = await world.existing(DEPLOYMENT)
        first.uninstall()
    assert control_plane.get("crd", CRD)["metadata"]["name"] == CRD
    assert (await world.existing(DEPLOYMENT))["metadata"]["uid"] == before["metadata"]["uid"]
    assert await is_ready(world)
    assert len(await world.pods()) == 1

    with release_of(control_plane) as second:
        second.install(values)
        with start(second, "second"):
            await world.client.delete(SERVICE, world.namespace, NAME)
            await world.until(_exists(world, SERVICE), seconds=30)
        assert (await world.existing(DEPLOYMENT))["metadata"]["generation"] == before["metadata"][
            "generation"
        ]
        second.uninstall()

    # Without any operator, what is left is deleted like anything else.
    await world.client.delete(SPECULATIVE_DEPLOYMENT, world.namespace, NAME)

    async def is_gone() -> bool:
        return await world.get(DEPLOYMENT) is None and not await world.pods()

    await world.until(is_gone, seconds=30)


def _exists(world: World, kind: Any) -> Callable[[], Any]:
    async def exists() -> bool:
        return await world.get(kind) is not None

    return exists


async def test_a_resource_named_like_the_operator_takes_nothing_of_it(
    local_control_plane: LocalCluster, client: ClusterClient, tmp_path: Path
) -> None:
    with release_of(local_control_plane) as release:
        release.install({"autoscaling": {"provider": "none"}})
        world = World(client, release.namespace, Kubelet(client, release.namespace))
        before = await made_objects(world)
        assert f"{DEPLOYMENT} {release.name}" in before
        with installed_operator(local_control_plane, release, tmp_path / "log"):
            await world.create(AUTOSCALED, name=release.name)

            async def is_told() -> bool:
                return (await world.conditions(release.name)).get("Ready") == ("False", "NameConflict")

            await world.until(is_told, seconds=30)
            await world.delete(name=release.name)

            async def is_as_before() -> bool:
                return await made_objects(world) == before

            await world.until(is_as_before, seconds=30)
            await asyncio.sleep(3)  # whatever was to be collected would be
            assert await is_as_before()
