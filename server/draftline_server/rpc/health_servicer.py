"""The gRPC health service: one status for every name that is known.

Not the servicer of `grpc_health`: it holds a lock while it sends, so one client that watches and takes no
message would hold up whoever sets a status. Here a status is set without waiting for anyone, and each
watcher is told at its own pace, the newest status only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftline_server.rpc.interceptors import Context

_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Serves Check and Watch. Belongs to the event loop."""

    def __init__(self, services: Sequence[str]) -> None:
        """`services` are the names to report, at first as not serving."""
        self._services = frozenset(services)
        self._is_serving = False
        # Set when the status of now is no longer the newest.
        self._changed = asyncio.Event()
        # By watcher, that of the status which it has been sent.
        self._told: dict[object, asyncio.Event | None] = {}

    @property
    def has_told_all(self) -> bool:
        """Whether every watcher has been sent the newest status."""
        return all(changed is self._changed for changed in self._told.values())

    def set_serving(self, *, is_serving: bool) -> None:
        """Tells all who ask or watch from now on."""
        if is_serving is not self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._response(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        watcher, told = object(), None
        self._told[watcher] = None
        try:
            while True:
                changed = (
                    self._changed
                )  # taken before the look: a change while a message is sent is not missed
                response = self._response(request.service)
                if response != told:
                    await context.write(response)
                    told = response
                self._told[watcher] = changed
                await changed.wait()
        finally:
            del self._told[watcher]

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self._is_serving else _Status.NOT_SERVING)
