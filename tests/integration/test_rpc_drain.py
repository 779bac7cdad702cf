"""Leaving without cutting a stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftline.v1 import inference_pb2_grpc
from draftline_server.app import EXIT_DRAINED, EXIT_INTERRUPTED
from draftline_server.errors import UnavailableError
from draftline_server.testing import ScriptedEngine
from support.serving import (
    HEALTH,
    RunningServer,
    failure_of,
    make_config,
    read_to_end,
    running_server,
    text_request,
    wait_for,
)


async def open_calls(serving: RunningServer, *, num_running: int, num_waiting: int) -> list[Any]:
    """Streams that have begun, and requests that wait, of an engine that is held."""
    serving.engine.hold()
    streams = []
    for index in range(num_running + num_waiting):
        streams.append(serving.stub.GenerateStream(text_request(f"{index} ", max_tokens=12)))
        await wait_for(lambda: serving.server.engine_thread.num_submitted == len(streams))
    serving.engine.release(2)  # the first step began before the other requests came
    await wait_for(lambda: serving.server.engine_thread.statistics.num_running == num_running)
    return streams


async def text_of(stream: Any) -> str:
    messages = [message async for message in stream]
    assert messages[-1].WhichOneof("message") == "summary"
    return "".join(message.chunk.text for message in messages[:-1])


async def test_every_accepted_request_finishes() -> None:
    config = make_config(lame_duck_seconds=0.3)
    async with running_server(ScriptedEngine(max_running=3), config=config) as serving:
        streams = await open_calls(serving, num_running=3, num_waiting=1)
        serving.server.request_stop()
        await wait_for(lambda: serving.server.health.is_draining)
        # At once: no new traffic is wanted, but what comes in the lame-duck time is served.
        assert await serving.health() == HEALTH.NOT_SERVING
        assert (await serving.get("/readyz"))[::2] == (503, "draining\n")
        assert (await serving.get("/healthz"))[0] == 200
        assert "draftline_draining 1.0" in (await serving.get("/metrics"))[2]
        streams.append(serving.stub.GenerateStream(text_request("4 ", max_tokens=12)))
        await wait_for(lambda: serving.server.engine_thread.num_submitted == 5)
        # Later: GOAWAY, and nobody to connect to.
        while serving.channel.get_state() is grpc.ChannelConnectivity.READY:
            await serving.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        refused = await failure_of(serving.stub.Generate(text_request("x")))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        serving.engine.resume()
        texts = await asyncio.gather(*map(text_of, streams))
        assert texts == [(f"{index} " * 6)[:12] for index in range(5)]
        assert await serving.task == EXIT_DRAINED


async def test_calls_are_served_until_connections_have_aged_and_then_refused() -> None:
    config = make_config(lame_duck_seconds=0.5, max_connection_age_seconds=0.2)
    async with running_server(config=config) as serving:
        serving.server.request_stop()
        codes, began = [], time.monotonic()
        while not serving.task.done():
            call = serving.stub.Generate(text_request("x", max_tokens=2))
            codes.append(await call.code())
            if codes[-1] is grpc.StatusCode.OK:
                served_for = time.monotonic() - began
        assert served_for > 0.5  # after the lame duck
        served = codes.count(grpc.StatusCode.OK)
        assert served > 0
        assert codes[:served] == [grpc.StatusCode.OK] * served
        # gRPC cancels the call that meets the GOAWAY half-way; see the note in drain.py.
        rest = codes[served + 1 :] if codes[served:][:1] == [grpc.StatusCode.CANCELLED] else codes[served:]
        assert set(rest) <= {grpc.StatusCode.UNAVAILABLE}


async def test_what_outlasts_the_drain_timeout_ends_with_a_status() -> None:
    config = make_config(request_timeout_seconds=0.3, drain_timeout_seconds=0.3)
    async with running_server(config=config) as serving:
        streams = await open_calls(serving, num_running=2, num_waiting=0)
        serving.server.request_stop()
        errors = [await failure_of(stream) for stream in streams]
        assert [error.code() for error in errors] == [grpc.StatusCode.UNAVAILABLE] * 2
        assert {error.details() for error in errors} == {"the server ended before the request did"}
        serving.engine.resume()
        assert await serving.task == EXIT_DRAINED


async def test_calls_that_still_come_are_told_to_go_elsewhere() -> None:
    async with running_server() as serving:
        serving.server.engine_thread.refuse(lambda: UnavailableError("the server is draining"))
        for call in (serving.stub.Generate, serving.stub.GenerateStream):
            error = await failure_of(call(text_request("x")))
            assert (error.code(), error.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "the server is draining",
            )
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"


async def test_second_interrupt_ends_at_once() -> None:
    async with running_server(config=make_config(lame_duck_seconds=60)) as serving:
        streams = await open_calls(serving, num_running=2, num_waiting=0)
        os.kill(os.getpid(), signal.SIGINT)
        await wait_for(lambda: serving.server.health.is_draining)
        os.kill(os.getpid(), signal.SIGINT)
        errors = [await failure_of(stream) for stream in streams]
        assert [error.code() for error in errors] == [grpc.StatusCode.UNAVAILABLE] * 2
        serving.engine.resume()
        assert await serving.task == EXIT_INTERRUPTED


@pytest.mark.timeout(60)
async def test_process_drains_on_sigterm_and_exits_with_zero() -> None:
    script = Path(__file__).parents[1] / "support" / "serve_scripted.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    assert process.stderr is not None
    ports: dict[str, int] = {}
    lines: list[dict[str, object]] = []
    while "server ready" not in [line["message"] for line in lines]:
        lines.append(json.loads(await process.stderr.readline()))
        ports |= {key: value for key, value in lines[-1].items() if key.endswith("_port")}  # type: ignore[misc]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.GenerateStream(text_request("abc ", max_tokens=40))
        first: Any = await stream.read()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        rest, summary = await read_to_end(stream)
    assert first.chunk.text + rest == "abc " * 10
    assert summary.usage.completion_tokens == 40
    log = (await process.stderr.read()).decode().splitlines()
    assert await process.wait() == EXIT_DRAINED
    messages = [json.loads(line)["message"] for line in log]
    assert "draining ended" in messages
