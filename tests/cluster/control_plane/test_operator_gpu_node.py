"""On a node with one GPU, by the real scheduler: a rollout comes to its end, and what is short is named."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from draftline_operator.cluster.client import ClusterClient
from draftline_operator.constants import COMPONENT_LABEL, SERVING
from draftline_operator.models.observed import Object, is_terminating
from support.kube.cluster import Cluster
from support.kubelet import Kubelet
from support.operator_world import World
from support.speculative_deployments import changed

GPU = "nvidia.com/gpu"
FETCHED: dict[str, Any] = {
    "target": {"model": {"uri": "hf://org/target", "revision": "a" * 40}},
    "accelerator": {"resourceName": GPU, "memory": "80Gi"},
}
SHORT = ("True", "InsufficientGPU")


@pytest.fixture
def gpu_node(control_plane: Cluster) -> Iterator[str]:
    """A node that exists on paper only, with a taint that keeps everybody else's pods away."""
    name = f"gpu-{secrets.token_hex(4)}"
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [{"key": "draftline.dev/test", "value": name, "effect": "NoSchedule"}]},
    }
    room = {"cpu": "8", "memory": "64Gi", "ephemeral-storage": "100Gi", "pods": "20", GPU: "1"}
    ready = {"type": "Ready", "status": "True", "reason": "OnPaper", "message": ""}
    status = {"capacity": room, "allocatable": room, "conditions": [ready]}
    control_plane.apply(node)
    patch = ("--subresource=status", "--type=merge", "--patch", json.dumps({"status": status}))
    control_plane.kubectl("patch", "node", name, *patch)
    yield name
    control_plane.kubectl("delete", "node", name)


@dataclass
class NodeWorld:
    """A world whose pods run only where the scheduler has put them, and leave when the node lets them."""

    world: World
    cluster: Cluster
    spec: dict[str, Any]

    async def step(self, *, lets_go: bool = True) -> None:
        await self.world.reconcile()
        await self.world.kubelet.step()
        if lets_go:
            await self._let_go()

    async def until(self, holds: Callable[[], Awaitable[bool]], *, lets_go: bool = True) -> None:
        """While operator, controllers, scheduler and node go on."""

        async def holds_now() -> bool:
            await self.step(lets_go=lets_go)
            return await holds()

        await self.world.until(holds_now, seconds=60)

    async def is_at_rest(self) -> bool:
        conditions = await self.world.conditions()
        return await self.world.is_ready() and conditions["Progressing"] == ("False", "RolledOut")

    async def is_short(self) -> bool:
        """Told as such; that nothing is ready until then may follow in a later look."""
        conditions = await self.world.conditions()
        return conditions["Progressing"] == SHORT and conditions["Ready"] == ("False", "InsufficientGPU")

    async def serving_pod(self) -> Object:
        """The only one that is to stay."""
        (found,) = [
            pod
            for pod in await self.world.pods()
            if pod["metadata"]["labels"][COMPONENT_LABEL] == SERVING and not is_terminating(pod)
        ]
        return found

    async def _let_go(self) -> None:
        """What a kubelet does once the containers have ended."""
        for pod in await self.world.pods():
            if is_terminating(pod):
                where = ("--namespace", self.world.namespace)
                now = ("--grace-period=0", "--force", "--wait=false", "--ignore-not-found")
                command = ("delete", "pod", pod["metadata"]["name"], *where, *now)
                await asyncio.to_thread(self.cluster.kubectl, *command)


@pytest.fixture
async def node_world(
    control_plane: Cluster, client: ClusterClient, control_plane_namespace: str, gpu_node: str
) -> NodeWorld:
    kubelet = Kubelet(client, control_plane_namespace, only_on_nodes=True)
    world = World(client, control_plane_namespace, kubelet)
    placement = {
        "nodeSelector": {"kubernetes.io/hostname": gpu_node},
        "tolerations": [{"operator": "Exists"}],
    }
    return NodeWorld(world, control_plane, changed(FETCHED, podTemplate=placement))


async def test_a_new_image_is_rolled_out_where_the_only_gpu_is_taken(node_world: NodeWorld) -> None:
    world = node_world.world
    await world.create(node_world.spec)
    await node_world.until(node_world.is_at_rest)
    await world.change({"image": "registry.test/server:2"})
    await node_world.until(node_world.is_short, lets_go=False)  # the old pod has not left yet
    conditions = await world.conditions()
    assert conditions["Degraded"][0] == "False", "that passes"
    await node_world.until(node_world.is_at_rest)
    pod = await node_world.serving_pod()
    assert pod["spec"]["containers"][0]["image"] == "registry.test/server:2"
    assert pod["spec"]["nodeName"]


async def test_a_pod_more_than_there_are_gpus_is_told_and_taken_back(node_world: NodeWorld) -> None:
    world = node_world.world
    await world.create(node_world.spec)
    await node_world.until(node_world.is_at_rest)
    await world.scale(2)
    await node_world.until(node_world.is_short)
    conditions = await world.conditions()
    assert conditions["Available"] == ("True", "PodsAvailable")
    await world.scale(1)
    await node_world.until(node_world.is_at_rest)
    pod = await node_world.serving_pod()
    assert pod["spec"]["nodeName"], "the one that serves is the one that stays"
