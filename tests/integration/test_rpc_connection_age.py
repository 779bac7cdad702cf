"""Connections end at their age, and what runs on them does not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from support.serving import RunningServer, make_config, read_to_end, running_server, text_request, wait_for

pytestmark = pytest.mark.timeout(60)

NotePeers = Callable[[RunningServer], list[str]]


@pytest.fixture
def note_peers(monkeypatch: pytest.MonkeyPatch) -> NotePeers:
    """From now on each call of a server adds the client's address and port: one for each connection."""

    def note(serving: RunningServer) -> list[str]:
        peers: list[str] = []
        record = serving.server.calls.record

        def noting(method: str, context: Any, **options: Any) -> Any:
            peers.append(context.peer())
            return record(method, context, **options)

        monkeypatch.setattr(serving.server.calls, "record", noting)
        return peers

    return note


async def test_stream_outlives_its_connection_and_the_client_connects_anew(note_peers: NotePeers) -> None:
    async with running_server(config=make_config(max_connection_age_seconds=0.2)) as serving:
        peers = note_peers(serving)
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
        assert (await serving.stub.Generate(text_request("ok", max_tokens=2))).text == "ok"
        assert len(set(peers)) == len(peers) == 2


async def test_calls_across_many_connections_all_succeed(note_peers: NotePeers) -> None:
    async with running_server(config=make_config(max_connection_age_seconds=0.1)) as serving:
        peers = note_peers(serving)
        while len(set(peers)) < 5:
            assert (await serving.stub.Generate(text_request("ok", max_tokens=2))).text == "ok"
            await asyncio.sleep(0.01)
        # One after the other, and calls share them.
        assert sum(before != after for before, after in itertools.pairwise(peers)) == 4
        assert len(peers) > 5
