"""A server in a process of its own, as a supervisor would run it, with real models."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2_grpc

from draftline.v1 import inference_pb2_grpc


class ServerProcess:
    """A running process, its log and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        """Every line of stderr that was JSON."""
        self.other_lines: list[str] = []
        self.ports: dict[str, int] = {}
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """To the gRPC port, which the log has told."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['grpc_port']}")
        return self._channel

    @property
    def stub(self) -> inference_pb2_grpc.InferenceAsyncStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def health_stub(self) -> Any:  # its published stubs have no methods
        return health_pb2_grpc.HealthStub(self.channel)

    async def wait_for_log(self, message: str) -> dict[str, Any]:
        """The first line with this message; fails where the process ends without it."""
        async with self._news:
            while not (lines := [line for line in self.log if line["message"] == message]):
                if self._reading.done() or self.process.returncode is not None:
                    raise AssertionError(f"no {message!r} in {self.log} {self.other_lines}")
                await self._news.wait()
        return lines[0]

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of a request to the admin port; raises `OSError` where there is no answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports["admin_port"])
        try:
            writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        if not head:
            raise ConnectionResetError("closed without an answer")
        return int(head.split(b" ")[1]), body.decode()

    async def metrics(self) -> dict[str, float]:
        """Every sample, by name and labels."""
        status, body = await self.get("/metrics")
        assert status == 200
        samples = (line.rpartition(" ") for line in body.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def close(self) -> None:
        """Ends it, if it has not ended."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading
        if self._channel is not None:
            await self._channel.close()

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode().rstrip("\n")
            async with self._news:
                if line.startswith("{"):
                    self.log.append(json.loads(line))
                    ports = ((k, v) for k, v in self.log[-1].items() if k in ("grpc_port", "admin_port"))
                    self.ports.update(ports)
                else:
                    self.other_lines.append(line)
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()


@asynccontextmanager
async def server_process(
    directory: Path, *, target: Path, draft: Path | None = None, **sections: dict[str, Any]
) -> AsyncIterator[ServerProcess]:
    """`draftline-server serve` with a file in `directory`; ended at the latest with the block."""
    models = {"target_model": {"path": str(target)}}
    if draft is not None:
        models["draft_model"] = {"path": str(draft)}
    server = {"host": "127.0.0.1", "grpc_port": 0, "admin_port": 0, "lame_duck_seconds": 0.0}
    document = {"models": models, **sections, "server": server | sections.get("server", {})}
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "draftline_server", "serve", "--config", str(file)),
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    running = ServerProcess(process)
    try:
        yield running
    finally:
        await running.close()
