"""What probes see: loading, ready, busy, hung, failed. And both ports."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2

from draftline.v1 import inference_pb2 as pb
from draftline_server.app import EXIT_ENGINE_FAILED, Server
from draftline_server.config import Config, parse_config
from draftline_server.core.served_pair import ServedPair
from draftline_server.errors import ModelError, ResourceError
from draftline_server.testing import ScriptedEngine, build_scripted_pair
from support.serving import (
    HEALTH,
    SERVICE,
    RunningServer,
    details_of,
    failure_of,
    make_config,
    running_server,
    text_request,
    wait_for,
)


@pytest.fixture
async def serving() -> AsyncIterator[RunningServer]:
    async with running_server() as running:
        yield running


async def test_ready_only_after_the_warm_up() -> None:
    may_load, engine = threading.Event(), ScriptedEngine()
    warmed_up_at_load: list[int] = []

    def build(_: Config) -> ServedPair:
        may_load.wait()
        warmed_up_at_load.append(engine.warm_ups)
        return build_scripted_pair(engine)

    async with running_server(engine, build=build, wait_until_ready=False) as serving:
        assert (await serving.get("/healthz"))[::2] == (200, "loading\n")
        assert (await serving.get("/readyz"))[::2] == (503, "loading\n")
        assert await serving.health() == HEALTH.NOT_SERVING
        assert await serving.health(SERVICE) == HEALTH.NOT_SERVING
        for call in (
            serving.stub.Generate(text_request("x")),
            serving.stub.Tokenize(pb.TokenizeRequest(text="x")),
            serving.stub.GetModelInfo(pb.GetModelInfoRequest()),
            serving.stub.GetServerInfo(pb.GetServerInfoRequest()),
        ):
            error = await failure_of(call)
            assert (error.code(), error.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "the models are loading",
            )
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        assert "draftline_model_info{" not in (await serving.get("/metrics"))[2]
        may_load.set()
        await serving.server.ready.wait()
        assert warmed_up_at_load == [0]
        assert engine.warm_ups == 1
        assert (await serving.get("/readyz"))[::2] == (200, "ready\n")
        assert await serving.health() == HEALTH.SERVING
        assert await serving.health(SERVICE) == HEALTH.SERVING
        assert "draftline_model_info{" in (await serving.get("/metrics"))[2]


async def test_failed_load_ends_the_server() -> None:
    def build(_: Config) -> ServedPair:
        raise ModelError("models.target_model.path: nothing there")

    with pytest.raises(ModelError, match="nothing there"):
        async with running_server(build=build):
            pass


async def test_stop_while_loading_is_no_failure() -> None:
    may_load = threading.Event()

    def build(_: Config) -> ServedPair:
        may_load.wait()
        return build_scripted_pair()

    async with running_server(build=build, wait_until_ready=False) as serving:
        serving.server.request_stop()
        await wait_for(lambda: not serving.server.health.is_ready)
        may_load.set()
        assert await serving.task == 0


async def test_unknown_health_service_is_not_found(serving: RunningServer) -> None:
    stub = serving.health_stub
    error = await failure_of(stub.Check(health_pb2.HealthCheckRequest(service="nobody")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


class Panic(BaseException):
    """As a library in Rust raises."""


@pytest.mark.parametrize("fault", [RuntimeError("secret"), Panic("secret")], ids=["exception", "panic"])
async def test_exception_in_a_step_fails_every_call_and_ends_the_process(
    serving: RunningServer, fault: BaseException
) -> None:
    serving.engine.hold()
    calls = [serving.stub.Generate(text_request("x")), serving.stub.GenerateStream(text_request("y"))]
    await wait_for(serving.engine.step_began.is_set)
    await wait_for(lambda: serving.server.engine_thread.num_submitted == 2)
    watch = serving.health_stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == HEALTH.SERVING
    serving.engine.fail_next_step(fault)
    serving.engine.resume()
    errors = [await failure_of(call) for call in calls]
    assert [error.code() for error in errors] == [grpc.StatusCode.INTERNAL] * 2
    assert all(details_of(error).startswith("internal error ") for error in errors)
    assert (await watch.read()).status == HEALTH.NOT_SERVING
    assert await serving.task == EXIT_ENGINE_FAILED


async def test_hung_step_is_unhealthy_until_it_returns() -> None:
    config = make_config(engine_hang_seconds=0.2)
    async with running_server(config=config) as serving:
        serving.engine.hold()
        call = serving.stub.Generate(text_request("x"))
        watch = serving.health_stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == HEALTH.SERVING
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (await watch.read()).status == HEALTH.NOT_SERVING
        assert (await serving.get("/healthz"))[::2] == (503, "hung\n")
        assert (await serving.get("/readyz"))[::2] == (503, "hung\n")
        refused = await failure_of(serving.stub.Generate(text_request("y")))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        serving.engine.resume()
        assert (await watch.read()).status == HEALTH.SERVING
        await serving.wait_until_idle()
        assert (await serving.stub.Generate(text_request("ok", max_tokens=2))).text == "ok"


async def test_idle_engine_is_not_hung() -> None:
    async with running_server(config=make_config(engine_hang_seconds=0.05)) as serving:
        await asyncio.sleep(0.1)
        assert (await serving.get("/readyz"))[0] == 200
        assert (await serving.stub.Generate(text_request("ok", max_tokens=2))).text == "ok"


async def test_probes_answer_during_a_long_step(serving: RunningServer) -> None:
    serving.engine.hold()
    call = serving.stub.Generate(text_request("ok", max_tokens=2))
    await wait_for(serving.engine.step_began.is_set)
    assert (await serving.get("/healthz"))[0] == 200
    assert (await serving.get("/metrics"))[0] == 200
    assert await serving.health() == HEALTH.SERVING
    serving.engine.resume()
    assert (await call).text == "ok"


async def test_admin_port_speaks_plain_http(serving: RunningServer) -> None:
    status, headers, body = await serving.get("/metrics?x=y")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    assert int(headers["content-length"]) == len(body.encode())
    assert (await serving.get("/healthz", method="HEAD"))[2] == ""
    assert (await serving.get("/"))[0] == 404
    assert (await serving.get("/healthz", method="POST"))[0] == 405
    assert (await serving.send_admin(b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    too_large = b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n"
    assert (await serving.send_admin(too_large)).startswith(b"HTTP/1.1 431 ")


async def test_metrics_can_be_switched_off() -> None:
    document = make_config().model_dump(mode="json") | {"observability": {"enable_metrics": False}}
    async with running_server(config=parse_config(document)) as serving:
        assert (await serving.get("/metrics"))[0] == 404
        assert (await serving.get("/readyz"))[0] == 200


@pytest.mark.parametrize("key", ["grpc_port", "admin_port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::]"])
async def test_port_in_use_is_named_before_anything_is_loaded(key: str, host: str) -> None:
    def build(_: Config) -> ServedPair:
        raise AssertionError("must not be called")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = make_config(**{key: taken.getsockname()[1], "host": host})
        with pytest.raises(ResourceError, match=rf"server\.{key}: "):
            await Server(config, build).run()


async def test_probes_are_answered_beside_any_number_of_idle_connections(serving: RunningServer) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", serving.server.admin_port) for _ in range(200)]
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await serving.get(path))[0] == 200
    oldest, newest = idle[0], idle[-1]
    with suppress(ConnectionError):
        assert await oldest[0].read() == b"", "it made room"
    newest[1].write(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (await newest[0].read()).startswith(b"HTTP/1.1 200 ")
    for _, writer in idle:
        writer.close()


async def test_idle_admin_connection_ends_with_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async with running_server() as serving:
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.server.admin_port)
        await serving.get("/healthz")  # by then the server has taken the first connection, too
        serving.server.request_stop()
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await serving.task
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("host", ["[::]", "::", "0.0.0.0", "localhost"])
async def test_both_ports_listen_on_the_configured_host(host: str) -> None:
    async with running_server(config=make_config(host=host)) as serving:
        assert (await serving.stub.Generate(text_request("ok", max_tokens=2))).text == "ok"
        assert (await serving.get("/readyz"))[0] == 200
