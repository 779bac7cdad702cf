"""Connections end at their age, and what runs on them does not."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from support.serving import make_config, read_to_end, running_server, text_request, wait_for


async def test_stream_outlives_its_connection_and_the_client_connects_anew() -> None:
    async with running_server(config=make_config(max_connection_age_seconds=0.2)) as serving:
        serving.engine.hold()
        stream = serving.stub.GenerateStream(text_request("abc", max_tokens=30))
        await wait_for(serving.engine.step_began.is_set)
        serving.engine.release()
        first: Any = await stream.read()
        state = serving.channel.get_state()
        while state is grpc.ChannelConnectivity.READY:
            await serving.channel.wait_for_state_change(state)
            state = serving.channel.get_state()
        serving.engine.resume()
        rest, summary = await read_to_end(stream)
        assert first.chunk.text + rest == "abc" * 10
        assert summary.usage.completion_tokens == 30


async def test_calls_across_many_connections_all_succeed() -> None:
    async with running_server(config=make_config(max_connection_age_seconds=0.1)) as serving:
        peers = set()
        for _ in range(40):
            call = serving.stub.Generate(text_request("ok", max_tokens=2))
            assert (await call).text == "ok"
            peers.add(dict(await call.initial_metadata())["x-request-id"])
            await asyncio.sleep(0.01)
        assert len(peers) == 40
