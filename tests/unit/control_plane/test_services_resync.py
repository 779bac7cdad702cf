"""Every resource is looked at again and again, whatever becomes of namespaces that it is not in."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Sequence

import pytest

from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.constants import API_VERSION, KIND
from draftline_operator.errors import ForbiddenError
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT, Kind
from draftline_operator.models.observed import Object
from draftline_operator.services import resync as module
from draftline_operator.services.resync import resync
from draftline_operator.services.worker import Key, WorkQueue
from support.object_store import ObjectStore


class Server(ObjectStore):
    """Nobody may list what is `refused`."""

    def __init__(self, *keys: Key) -> None:
        super().__init__(resource(*key) for key in keys)
        self.refused: set[str] = set()

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        if namespace in self.refused:
            raise ForbiddenError(f"{namespace} may not be listed")
        return await super().list(kind, namespace, labels=labels, is_cached=is_cached)


def resource(namespace: str, name: str) -> Object:
    metadata = {"namespace": namespace, "name": name}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}


async def next_key(queue: WorkQueue) -> Key:
    async with asyncio.timeout(10):
        key = await queue.take()
    queue.give_back(key)
    return key


@pytest.mark.parametrize("namespaces", [(), ("models",), ("gone", "models"), ("models", "gone")], ids=str)
async def test_all_that_can_be_listed_is_looked_at_again_and_again(namespaces: Sequence[str]) -> None:
    server = Server(("models", "chat"))
    server.refused = {"gone"}
    queue = WorkQueue(asyncio.get_running_loop().time)
    memory = ObjectMemory([SPECULATIVE_DEPLOYMENT])
    task = asyncio.create_task(resync(server, queue, memory, namespaces, interval=0.01))
    assert [await next_key(queue) for _ in range(3)] == 3 * [("models", "chat")]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_namespace_that_comes_back_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_RETRY_SECONDS", 0.01)
    server = Server(("gone", "chat"))
    server.refused = {"gone"}
    queue = WorkQueue(asyncio.get_running_loop().time)
    memory = ObjectMemory([SPECULATIVE_DEPLOYMENT])
    task = asyncio.create_task(resync(server, queue, memory, ("gone",), interval=300))
    await asyncio.sleep(0.05)
    assert len(queue) == 0
    server.refused = set()
    assert await next_key(queue) == ("gone", "chat")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_remembered_is_forgotten_before() -> None:
    memory = ObjectMemory([SPECULATIVE_DEPLOYMENT])
    for namespace in ("models", "others"):
        body = resource(namespace, "chat")
        body["metadata"] |= {"uid": f"uid-in-{namespace}", "resourceVersion": "1"}
        memory.learn(SPECULATIVE_DEPLOYMENT, body)
    queue = WorkQueue(asyncio.get_running_loop().time)
    task = asyncio.create_task(resync(Server(("models", "chat")), queue, memory, ("models",), interval=300))
    await next_key(queue)
    assert memory.get(SPECULATIVE_DEPLOYMENT, "models", "chat") is None
    assert memory.get(SPECULATIVE_DEPLOYMENT, "others", "chat") is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
