"""Live figures of one resource, or of one namespace, that cannot be written keep nobody else's back."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from aiohttp import web

from draftline_operator.cluster.interface import Subresource
from draftline_operator.cluster.pods import PodScraper
from draftline_operator.constants import API_VERSION, INSTANCE_LABEL, KIND
from draftline_operator.errors import ClusterError, ForbiddenError, OperatorError, RejectedError
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT, Kind
from draftline_operator.models.observed import Object
from draftline_operator.services.figures import write_figures
from draftline_operator.services.load import LoadCache
from support.object_store import ObjectStore
from support.observations import serving_pod

PAGE = "draftline_requests_running 1\ndraftline_requests_waiting 7\n"
NAMES = ("a", "b", "c")


class Server(ObjectStore):
    """Some of it is refused."""

    def __init__(self, *namespaces: str) -> None:
        super().__init__(found for namespace in namespaces for found in resources(namespace))
        self.unwritable: dict[str, OperatorError] = {}
        self.unlistable: set[str] = set()

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        if namespace in self.unlistable and kind == SPECULATIVE_DEPLOYMENT:
            raise ForbiddenError(f"{namespace} may not be listed")
        return await super().list(kind, namespace, labels=labels, is_cached=is_cached)

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: Subresource | None = None,
    ) -> Object | None:
        if (refusal := self.unwritable.get(name)) is not None:
            raise refusal
        return await super().patch(kind, namespace, name, change, subresource=subresource)

    def depths(self) -> dict[str, int | None]:
        """By namespace and name."""
        return {
            f"{namespace}/{name}": found["status"].get("queueDepth")
            for (kind, namespace, name), found in self.objects.items()
            if kind == KIND
        }


def resources(namespace: str) -> builtins.list[Object]:
    """Each with one pod."""
    found = []
    for name in NAMES:
        metadata = {"namespace": namespace, "name": name}
        status = {"observedGeneration": 1}
        found.append({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status})
        pod = serving_pod(f"pod-{name}", metadata={"namespace": namespace, "uid": f"{namespace}-{name}"})
        pod["metadata"]["labels"][INSTANCE_LABEL] = name
        found.append(pod)
    return found


@pytest.fixture
async def scraper() -> AsyncIterator[PodScraper]:
    """Of pods that all answer the same."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    application = web.Application()
    application.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with PodScraper(lambda: 1000.0, port=runner.addresses[0][1], timeout=30.0) as opened:
        yield opened
    await runner.cleanup()


async def write(server: Server, scraper: PodScraper, *namespaces: str) -> None:
    """Until the last one has been written."""
    loads = LoadCache(server, scraper, namespaces=namespaces, clock=lambda: 1000.0, metrics=OperatorMetrics())
    await loads.sample()
    task = asyncio.create_task(write_figures(server, loads, namespaces, interval=0.01))
    async with asyncio.timeout(5):
        while server.depths()["models/c"] is None:  # noqa: ASYNC110 (in another task)
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "refusal", [RejectedError("bad"), ForbiddenError("may not"), ClusterError("later")], ids=str
)
async def test_one_status_that_cannot_be_written_does_not_keep_back_the_others(
    scraper: PodScraper, refusal: OperatorError
) -> None:
    server = Server("models")
    server.unwritable["a"] = refusal
    await write(server, scraper)
    assert server.depths() == {"models/a": None, "models/b": 7, "models/c": 7}


async def test_one_namespace_that_is_gone_does_not_keep_back_the_others(scraper: PodScraper) -> None:
    server = Server("gone", "models")
    server.unlistable = {"gone"}
    await write(server, scraper, "gone", "models")
    assert [depth for key, depth in server.depths().items() if key.startswith("models/")] == [7, 7, 7]
    assert server.depths()["gone/a"] is None
