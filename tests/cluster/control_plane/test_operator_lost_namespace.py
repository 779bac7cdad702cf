"""Of several namespaces one goes, and the operator's Role in it: in the others nothing of that is felt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from draftline_operator.cluster.client import ClusterClient, load_configuration
from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.handlers import watch as module
from draftline_operator.handlers.registry import watched_kinds
from draftline_operator.handlers.watch import watch
from draftline_operator.services.worker import WorkQueue
from support.kube.local import LocalCluster
from support.operator_process import OperatorProcess, running_operator
from support.operator_world import NAME, World
from support.operators import wait_until_it_leads

RBAC = "rbac.authorization.k8s.io"


def grant(cluster: LocalCluster, user: str, namespace: str) -> None:
    """Everything in this namespace, and nothing elsewhere."""
    metadata = {"name": "operator", "namespace": namespace}
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    role = {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": rules}
    binding: dict[str, Any] = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "subjects": [{"kind": "User", "apiGroup": RBAC, "name": user}],
        "roleRef": {"kind": "Role", "apiGroup": RBAC, "name": "operator"},
    }
    cluster.apply(role, binding, namespace=namespace)


@pytest.fixture
def kubeconfig(world: World, twin: World, local_control_plane: LocalCluster) -> Path:
    """Of whoever may do everything in two namespaces."""
    user = f"operator-{world.namespace}"
    for namespace in (world.namespace, twin.namespace):
        grant(local_control_plane, user, namespace)
    return local_control_plane.kubeconfig_for(user)


async def delete_namespace(cluster: LocalCluster, name: str) -> None:
    await asyncio.to_thread(cluster.kubectl, "delete", "namespace", name, "--timeout=60s")


async def assert_goes_on(operator: OperatorProcess, world: World) -> None:
    await world.change({"replicas": 2})
    await world.until(world.is_ready, seconds=30)
    assert (await world.status())["readyReplicas"] == 2
    assert operator.process.poll() is None


@pytest.mark.usefixtures("kubelet_runs")
async def test_an_operator_goes_on_while_one_of_its_namespaces_goes(
    world: World, twin: World, local_control_plane: LocalCluster, kubeconfig: Path, tmp_path: Path
) -> None:
    watched = f"{twin.namespace},{world.namespace}"
    often = {"resync_seconds": 1.0, "figures_seconds": 1.0}
    await twin.create()
    with running_operator(
        kubeconfig, world.namespace, tmp_path / "log", watch_namespaces=watched, **often
    ) as operator:
        await wait_until_it_leads(operator)
        await world.create()
        await world.until(world.is_ready, seconds=30)
        await delete_namespace(local_control_plane, twin.namespace)
        await asyncio.sleep(5)
        await assert_goes_on(operator, world)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("kubelet_runs")
async def test_an_operator_that_starts_without_one_of_its_namespaces_works_in_the_others_for_good(
    world: World, twin: World, local_control_plane: LocalCluster, kubeconfig: Path, tmp_path: Path
) -> None:
    await delete_namespace(local_control_plane, twin.namespace)
    watched = f"{twin.namespace},{world.namespace}"
    with running_operator(
        kubeconfig, world.namespace, tmp_path / "log", watch_namespaces=watched
    ) as operator:
        await wait_until_it_leads(operator)
        await world.create()
        await world.until(world.is_ready, seconds=30)
        await asyncio.sleep(75)  # by itself kopf would give up after 54
        await assert_goes_on(operator, world)


async def test_a_namespace_is_watched_as_soon_as_the_role_in_it_is_back(
    world: World, twin: World, local_control_plane: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_WAITS", ())
    monkeypatch.setattr(module, "_LAST_WAIT", 0.1)
    user = f"watcher-{world.namespace}"
    grant(local_control_plane, user, world.namespace)
    configuration = await load_configuration(str(local_control_plane.kubeconfig_for(user)))
    queue, stop = WorkQueue(asyncio.get_running_loop().time), asyncio.Event()

    async def seen() -> tuple[str, str]:
        async with asyncio.timeout(20):
            key = await queue.take()
        queue.give_back(key, is_gone=True)
        return key

    async with ClusterClient(configuration) as limited:
        task = asyncio.create_task(
            watch(
                queue,
                ObjectMemory(watched_kinds(())),
                namespaces=(twin.namespace, world.namespace),
                optional_kinds=(),
                credentials=limited.credentials,
                stop=stop,
            )
        )
        await twin.create()
        await world.create()
        assert await seen() == (world.namespace, NAME)
        await asyncio.sleep(2)
        assert not task.done(), "it gave up"
        grant(local_control_plane, user, twin.namespace)
        assert await seen() == (twin.namespace, NAME)
        stop.set()
        await asyncio.wait_for(task, 30)
