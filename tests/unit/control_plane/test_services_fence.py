"""Nothing is written by an operator that does not lead, or may not lead any more."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes_asyncio import client as kubernetes

from draftline_operator.cluster.client import ClusterClient
from draftline_operator.cluster.interface import Cluster
from draftline_operator.errors import ClusterError
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.models.kinds import CONFIG_MAP
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest
from draftline_operator.services.fence import FencedCluster
from draftline_operator.testing import RecordingCluster
from support.object_store import ObjectStore

KEY = ("ConfigMap", "models", "a")
THERE = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"namespace": "models", "name": "a"},
    "data": {"x": "1"},
}
CHANGED = {**THERE, "data": {"x": "2"}}

WRITES: dict[str, Callable[[Cluster], Awaitable[Any]]] = {
    "create": lambda cluster: cluster.create(CHANGED),
    "replace": lambda cluster: cluster.replace(CHANGED),
    "apply": lambda cluster: cluster.apply(CHANGED),
    "patch": lambda cluster: cluster.patch(CONFIG_MAP, "models", "a", {"data": {"x": "2"}}),
    "patch/status": lambda cluster: cluster.patch(CONFIG_MAP, "models", "a", {}, subresource="status"),
    "delete": lambda cluster: cluster.delete(CONFIG_MAP, "models", "a"),
}


class Server(ObjectStore):
    """To apply is to put."""

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        return self.put(manifest)


class Fence:
    """Around a server with one object; `is_leader` is what the Lease says."""

    def __init__(self) -> None:
        self.is_leader = True
        self.metrics = OperatorMetrics()
        self.server = Server([THERE])
        self.reached = RecordingCluster(self.server)
        self.cluster = FencedCluster(self.reached, lambda: self.is_leader, self.metrics)

    def counted(self) -> list[str]:
        text = self.metrics.render().decode()
        return [line for line in text.splitlines() if line.startswith("draftline_operator_writes_total{")]


@pytest.mark.parametrize("verb", WRITES)
async def test_whoever_leads_writes_and_is_counted(verb: str) -> None:
    fence = Fence()
    await WRITES[verb](fence.cluster)
    assert [written[0] for written in fence.reached.writes] == [verb]
    assert fence.counted() == [f'draftline_operator_writes_total{{kind="ConfigMap",verb="{verb}"}} 1.0']


@pytest.mark.parametrize("verb", WRITES)
async def test_whoever_does_not_lead_any_more_writes_nothing(verb: str) -> None:
    fence = Fence()
    before = copy.deepcopy(fence.server.objects)
    fence.is_leader = False
    with pytest.raises(ClusterError, match="does not lead"):
        await WRITES[verb](fence.cluster)
    assert fence.server.objects == before
    assert fence.reached.writes == []
    assert fence.counted() == []


async def test_whoever_does_not_lead_reads() -> None:
    fence = Fence()
    fence.is_leader = False
    assert await fence.cluster.get(CONFIG_MAP, "models", "a") == fence.server.objects[KEY]
    assert await fence.cluster.list(CONFIG_MAP, "models") == [fence.server.objects[KEY]]
    assert await fence.cluster.serves(CONFIG_MAP)
    assert await fence.cluster.minor_version() > 0


# ------------------------------------------------------------------------------------- when the body leaves


class Listener:
    """An HTTP server that takes whatever comes, and keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.port = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return web.json_response(THERE)


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", listener.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    listener.port = runner.addresses[0][1]
    yield listener
    await runner.cleanup()


@pytest.mark.parametrize("verb", WRITES)
async def test_no_body_leaves_once_the_lead_is_lost_whatever_was_decided_before(
    listener: Listener, verb: str
) -> None:
    is_leader = True
    async with ClusterClient(kubernetes.Configuration(host=f"http://127.0.0.1:{listener.port}")) as client:
        fenced = client.fenced(lambda: is_leader)
        await WRITES[verb](fenced)
        assert len(listener.bodies) == 1
        is_leader = False
        with pytest.raises(ClusterError, match="does not lead"):
            await WRITES[verb](fenced)
        assert await fenced.get(CONFIG_MAP, "models", "a") == THERE, "reads go on"
        await WRITES[verb](client)  # its Lease is no matter of the fence
    assert [body for body in listener.bodies if body] == [listener.bodies[0], listener.bodies[-1]]
