"""A client that watches health and takes no message: it gives the server a window of 0 bytes.

HTTP/2 by hand, because a library reads whether or not its user does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from grpc_health.v1 import health_pb2

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_REQUEST_HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/grpc.health.v1.Health/Watch",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


@asynccontextmanager
async def unread_watches(port: int, services: Sequence[str]) -> AsyncIterator[None]:
    """One watch of each service on one connection. From the first moment on the server has answered their
    headers, and the status itself waits to be sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        no_window = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + (0).to_bytes(4, "big")
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, no_window))
        for index, service in enumerate(services):
            stream = 2 * index + 1
            writer.write(_frame(_HEADERS, _END_HEADERS, stream, _pack_headers(_REQUEST_HEADERS)))
            writer.write(_frame(_DATA, _END_STREAM, stream, _request(service)))
        answered: set[int] = set()
        while len(answered) < len(services):
            kind, flags, stream = await _read_frame(reader)
            assert kind != _DATA, "there was no window for it"
            if kind == _SETTINGS and not flags & _ACK:
                writer.write(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _HEADERS:
                answered.add(stream)
        yield
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def _request(service: str) -> bytes:
    message = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message


def _pack_headers(headers: Mapping[str, str]) -> bytes:
    """Each as a literal with a new name, which needs no table; no text is longer than 126 bytes."""
    return b"".join(b"\0" + _pack_text(name) + _pack_text(value) for name, value in headers.items())


def _pack_text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int]:
    """Kind, flags and stream of the next frame."""
    head = await reader.readexactly(9)
    await reader.readexactly(int.from_bytes(head[:3], "big"))
    return head[3], head[4], int.from_bytes(head[5:], "big")
