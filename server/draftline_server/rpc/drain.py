"""How a server leaves: nobody's stream is cut.

    signal        health NOT_SERVING, /readyz 503; calls are still taken, since balancers need a moment
    + lame duck   GOAWAY on every connection and the port closes: clients connect to other replicas, and
                  calls that were on their way get UNAVAILABLE with pushback
    + at most the drain timeout
                  accepted requests finish, waiting ones too
    then          what is left ends with UNAVAILABLE

So the whole takes at most lame_duck_seconds + drain_timeout_seconds and a few seconds more.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from draftline_server.config import ServerConfig
from draftline_server.errors import UnavailableError
from draftline_server.log import log_event
from draftline_server.rpc.calls import Calls
from draftline_server.rpc.health import ServingHealth
from draftline_server.runner_thread import RETRY_AFTER_SECONDS, EngineThread

# For statuses of calls that were ended to reach their clients.
_FAREWELL_SECONDS = 5.0

# `end` always stops the server again, at once. NOTE: gRPC crashes where the first stop's grace passes while
# the second is at work, and the first would otherwise wait for health watchers, who never leave.
_UNTIL_ENDED = 7 * 86_400.0

_logger = logging.getLogger(__name__)


class Drain:
    """Ends a server's calls, politely or at once."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        server: grpc.aio.Server,
        health: ServingHealth,
        calls: Calls,
        engine_thread: EngineThread,
    ) -> None:
        self._config = config
        self._server = server
        self._health = health
        self._calls = calls
        self._engine_thread = engine_thread
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Drains; returns when no call is left and the port is closed."""
        await self._health.start_draining()
        log_event(
            _logger,
            logging.INFO,
            "draining began",
            calls=self._calls.num_open,
            lame_duck_seconds=self._config.lame_duck_seconds,
            drain_timeout_seconds=self._config.drain_timeout_seconds,
        )
        await asyncio.sleep(self._config.lame_duck_seconds)
        self._engine_thread.refuse(_draining)
        # GOAWAY and a closed port: what comes after goes to another replica, even a retry.
        self._stopping = asyncio.create_task(self._server.stop(_UNTIL_ENDED))
        try:
            async with asyncio.timeout(self._config.drain_timeout_seconds):
                await self._calls.wait_until_idle()
        except TimeoutError:
            log_event(_logger, logging.WARNING, "drain timeout passed", calls=self._calls.num_open)
        await self.end()
        log_event(_logger, logging.INFO, "draining ended")

    async def end(self) -> None:
        """Ends what is left, each call with a status, and closes the port."""
        self._engine_thread.refuse(_draining)
        self._engine_thread.fail_all(_cut_short)
        try:
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await self._calls.wait_until_idle()
        except TimeoutError:
            log_event(
                _logger, logging.WARNING, "clients did not take their status", calls=self._calls.num_open
            )
        await self._server.stop(None)
        if self._stopping is not None:
            await self._stopping


def _draining() -> UnavailableError:
    return UnavailableError("the server is draining", retry_after_seconds=RETRY_AFTER_SECONDS)


def _cut_short() -> UnavailableError:
    return UnavailableError(
        "the server ended before the request did", retry_after_seconds=RETRY_AFTER_SECONDS
    )
