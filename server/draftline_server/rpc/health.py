"""Whether this server lives and whether it should get traffic, for probes of both kinds.

The gRPC health service says what `is_ready` says, within a second of any change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from draftline_server.errors import UnavailableError
from draftline_server.log import log_event
from draftline_server.rpc.health_servicer import HealthServicer
from draftline_server.runner_thread import RETRY_AFTER_SECONDS, EngineHealth, EngineThread

_POLL_SECONDS = 0.5

_logger = logging.getLogger(__name__)


class ServingHealth:
    """Reads the engine's health, adds draining, tells the gRPC health service. Nothing here waits."""

    def __init__(self, engine_thread: EngineThread, *, services: Sequence[str]) -> None:
        """`services` are the names to report; "" is the server as a whole."""
        self._engine_thread = engine_thread
        self.servicer = HealthServicer(services)
        self.is_draining = False
        self._last_health: EngineHealth | None = None

    @property
    def is_alive(self) -> bool:
        """False where only a restart helps. A busy, loading or draining server is alive."""
        return self._engine_thread.health in (EngineHealth.LOADING, EngineHealth.READY, EngineHealth.STOPPED)

    @property
    def is_ready(self) -> bool:
        """Whether the server should get traffic."""
        return not self.is_draining and self._engine_thread.health is EngineHealth.READY

    @property
    def reason(self) -> str:
        """A word for people who look at a probe."""
        return "draining" if self.is_draining else self._engine_thread.health.value

    def start_draining(self) -> None:
        """Not ready from now on, for good."""
        self.is_draining = True
        self.refresh()

    def refresh(self) -> None:
        """Looks now and tells the gRPC health service."""
        health_now = self._engine_thread.health
        if health_now is not self._last_health:
            self._note(health_now)
        self.servicer.set_serving(is_serving=self.is_ready)

    async def watch(self) -> None:
        """Refreshes until cancelled."""
        while True:
            self.refresh()
            await asyncio.sleep(_POLL_SECONDS)

    def _note(self, health_now: EngineHealth) -> None:
        level = logging.ERROR if health_now in (EngineHealth.HUNG, EngineHealth.FAILED) else logging.INFO
        log_event(_logger, level, "engine health changed", health=health_now.value)
        self._last_health = health_now
        if health_now is EngineHealth.HUNG:
            self._engine_thread.fail_all(
                lambda: UnavailableError(
                    "the engine does not respond", retry_after_seconds=RETRY_AFTER_SECONDS
                )
            )
