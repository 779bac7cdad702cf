"""A whole server in this process, around a scripted engine, with a client connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftline.v1 import inference_pb2 as pb
from draftline.v1 import inference_pb2_grpc
from draftline_server.app import Server
from draftline_server.config import Config, parse_config
from draftline_server.core.served_pair import ServedPair
from draftline_server.testing import ByteTokenizer, ScriptedEngine, build_scripted_pair

BuildPair = Callable[[Config], ServedPair]

HEALTH = health_pb2.HealthCheckResponse
SERVICE = "draftline.v1.Inference"


def make_config(**server: Any) -> Config:
    """A configuration for tests: free ports, loopback, no lame duck; `server` overrides its section."""
    section = {
        "host": "127.0.0.1",
        "grpc_port": 0,
        "admin_port": 0,
        "lame_duck_seconds": 0.0,
        "max_concurrent_requests": 4,
        "max_queue_length": 4,
        **server,
    }
    return parse_config({"server": section, "models": {"target_model": {"path": str(Path("unused"))}}})


@dataclass
class RunningServer:
    """A server, its task and a client."""

    server: Server
    task: asyncio.Task[int]
    channel: grpc.aio.Channel
    engine: ScriptedEngine
    tokenizer: ByteTokenizer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"

    @property
    def stub(self) -> inference_pb2_grpc.InferenceAsyncStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    async def health(self, service: str = "") -> int:
        response = await self.health_stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(response.status)

    @property
    def health_stub(self) -> Any:  # its published stubs have no methods
        return health_pb2_grpc.HealthStub(self.channel)

    async def get(self, path: str, *, method: str = "GET") -> tuple[int, dict[str, str], str]:
        """Status, headers and body of a request to the admin port."""
        raw = await self.send_admin(f"{method} {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
        head, _, body = raw.partition(b"\r\n\r\n")
        status_line, *header_lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in header_lines)
        return int(status_line.split(" ")[1]), headers, body.decode()

    async def send_admin(self, raw: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.admin_port)
        writer.write(raw)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def wait_until_idle(self) -> None:
        """Returns when nothing runs, waits or holds cache."""

        def is_idle() -> bool:
            now = self.server.engine_thread.statistics
            return not (
                now.num_running or now.num_waiting or now.kv_blocks_used or self.server.calls.num_open
            )

        await wait_for(is_idle)


@asynccontextmanager
async def running_server(
    engine: ScriptedEngine | None = None,
    *,
    config: Config | None = None,
    build: BuildPair | None = None,
    wait_until_ready: bool = True,
) -> AsyncIterator[RunningServer]:
    """Starts a server and ends it at the latest with the block."""
    engine = engine if engine is not None else ScriptedEngine()
    tokenizer = ByteTokenizer()
    server = Server(
        config if config is not None else make_config(),
        build if build is not None else lambda _: build_scripted_pair(engine, tokenizer=tokenizer),
    )
    task = asyncio.create_task(server.run())
    await first_of(task, server.ready if wait_until_ready else server.listening)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        try:
            yield RunningServer(server, task, channel, engine, tokenizer)
        finally:
            engine.resume()
            server.request_stop()
            await asyncio.wait({task})


async def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; the test's own time limit ends what never does."""
    while not condition():  # noqa: ASYNC110 - the state is another thread's, which has no event for it
        await asyncio.sleep(0.002)


async def first_of(task: asyncio.Task[int], event: asyncio.Event) -> None:
    """Returns when the event is set; raises what the task raised if it ended before."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()


def text_request(text: str, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))


async def read_to_end(stream: Any) -> tuple[str, pb.Summary]:
    """What is left of a stream, by the reader API: the joined text and the summary."""
    text, message = "", await stream.read()
    while message.WhichOneof("message") == "chunk":
        text, message = text + message.chunk.text, await stream.read()
    return text, message.summary


def details_of(error: grpc.aio.AioRpcError) -> str:
    details = error.details()
    assert details is not None
    return details


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a unary call, or a stream read to its end, fails with."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
