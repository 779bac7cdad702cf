"""The admin port: /metrics, /healthz, /readyz over plain HTTP.

A few lines on asyncio instead of a framework: three GET routes do not earn a dependency. It runs on the
event loop on purpose, not in a thread of its own: when the loop hangs, no call is answered either, and a
probe that still said 200 would lie. Steps and loading run in the engine's thread, so they do not delay it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from draftline_server.config import ServerConfig
from draftline_server.log import log_event
from draftline_server.rpc.ports import listen

_MAX_HEAD_BYTES = 8192
_MAX_CONNECTIONS = 64
_READ_TIMEOUT_SECONDS = 5.0
_PLAIN_TEXT = "text/plain; charset=utf-8"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Response:
    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN_TEXT


Route = Callable[[], Response]


class AdminServer:
    """Answers GET and HEAD, one request per connection."""

    def __init__(self, routes: dict[str, Route]) -> None:
        self._routes = routes
        self._connections: dict[asyncio.Task[object], asyncio.StreamWriter] = {}
        self._socket: socket.socket
        self._server: asyncio.Server

    def bind(self, config: ServerConfig) -> int:
        """Takes the port and returns it; raises `ResourceError` naming the key."""
        self._socket = listen(config.host, config.admin_port, key="server.admin_port")
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=_MAX_HEAD_BYTES)

    async def stop(self) -> None:
        """Closes the port, and connections on which nothing was asked yet."""
        self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs this as a task"
        self._connections[task] = writer
        self._make_room()
        try:
            writer.write(await self._answer(reader))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            log_event(_logger, logging.DEBUG, "admin client went away")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            del self._connections[task]

    def _make_room(self) -> None:
        """Ends the oldest connection where there are too many.

        Who has something to ask does so at once, so the oldest is one that does not: however many of them
        there are, a probe is answered.
        """
        still_open = [writer for writer in self._connections.values() if not writer.is_closing()]
        if len(still_open) > _MAX_CONNECTIONS:
            still_open[0].transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return _encode(Response(HTTPStatus.REQUEST_TIMEOUT, b"no request came\n"))
        except asyncio.LimitOverrunError:
            return _encode(Response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"header too large\n"))
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _encode(Response(HTTPStatus.BAD_REQUEST, b"not an HTTP/1 request\n"))
        method, target = words[0], words[1].decode("latin-1").partition("?")[0]
        if method not in (b"GET", b"HEAD"):
            return _encode(Response(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n"))
        return _encode(self._route(target), with_body=method == b"GET")

    def _route(self, target: str) -> Response:
        route = self._routes.get(target)
        if route is None:
            known = ", ".join(self._routes)
            return Response(HTTPStatus.NOT_FOUND, f"not found; there is: {known}\n".encode())
        try:
            return route()
        except Exception as error:
            log_event(_logger, logging.ERROR, "admin request failed", target=target, exc_info=error)
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal error\n")


def _encode(response: Response, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (response.body if with_body else b"")
