"""Who watches health is told of every change, and who takes no message holds up nobody."""

from __future__ import annotations

import asyncio
import threading

import pytest
from grpc_health.v1 import health_pb2

from draftline_server.app import EXIT_DRAINED
from draftline_server.config import Config
from draftline_server.core.served_pair import ServedPair
from draftline_server.testing import build_scripted_pair
from support.serving import (
    HEALTH,
    SERVICE,
    RunningServer,
    failure_of,
    make_config,
    running_server,
    text_request,
    wait_for,
)
from support.unread_watches import unread_watches

pytestmark = pytest.mark.timeout(60)

# Several watches of the server as a whole, of the service and of what is not there.
UNREAD = [*("", SERVICE, "nobody") * 3]


async def see(serving: RunningServer, status: int) -> None:
    """Returns when the health service says so."""
    while await serving.health() != status:  # noqa: ASYNC110 - it is asked as a client would
        await asyncio.sleep(0.01)


async def test_a_server_gets_ready_beside_them() -> None:
    may_load = threading.Event()

    def build(_: Config) -> ServedPair:
        may_load.wait()
        return build_scripted_pair()

    async with (
        running_server(build=build, wait_until_ready=False) as serving,
        unread_watches(serving.server.grpc_port, UNREAD),
    ):
        may_load.set()
        await serving.server.ready.wait()
        await see(serving, HEALTH.SERVING)
        assert (await serving.stub.Generate(text_request("ok", max_tokens=2))).text == "ok"


async def test_a_hung_step_is_noticed_beside_them() -> None:
    async with (
        running_server(config=make_config(engine_hang_seconds=0.2)) as serving,
        unread_watches(serving.server.grpc_port, UNREAD),
    ):
        serving.engine.hold()
        error = await failure_of(serving.stub.Generate(text_request("x")))
        assert error.details() == "the engine does not respond"
        await see(serving, HEALTH.NOT_SERVING)
        serving.engine.resume()
        await see(serving, HEALTH.SERVING)


async def test_a_server_drains_beside_them() -> None:
    async with (
        running_server(config=make_config(lame_duck_seconds=0.5)) as serving,
        unread_watches(serving.server.grpc_port, UNREAD),
    ):
        serving.server.request_stop()
        await wait_for(lambda: serving.server.health.is_draining)
        for service in ("", SERVICE):
            assert await serving.health(service) == HEALTH.NOT_SERVING
        assert await serving.task == EXIT_DRAINED


async def test_a_watcher_is_told_at_once_and_of_changes_only() -> None:
    async with running_server(config=make_config(lame_duck_seconds=0.5)) as serving:
        watch = {
            service: serving.health_stub.Watch(health_pb2.HealthCheckRequest(service=service))
            for service in ("", SERVICE, "nobody")
        }
        first = {service: (await call.read()).status for service, call in watch.items()}
        assert first == {
            "": HEALTH.SERVING,
            SERVICE: HEALTH.SERVING,
            "nobody": HEALTH.SERVICE_UNKNOWN,
        }
        serving.server.request_stop()
        for service in ("", SERVICE):
            assert (await watch[service].read()).status == HEALTH.NOT_SERVING
        watch["nobody"].cancel()
        assert await serving.task == EXIT_DRAINED
