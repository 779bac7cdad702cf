"""The composition root: puts a server together, runs it, and says with which exit code it ended.

    0    drained after SIGTERM or SIGINT
    1    the engine failed while serving; the log has the traceback under an id
    2    it could not start (`StartupError`; printed by `__main__`)
    130  a second SIGINT cut the drain short

Both ports are taken before any model is loaded: a port in use costs no minutes of loading, and probes see
a process that lives and is not ready. Ready means: a warm-up inference has run through every model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import grpc
import uvloop

from draftline_server import __version__
from draftline_server.config import Config
from draftline_server.core.served_pair import ServedPair
from draftline_server.errors import UnavailableError
from draftline_server.frontend import Frontend
from draftline_server.log import log_event
from draftline_server.metrics import CONTENT_TYPE, ServerMetrics, ServerState
from draftline_server.rpc.admin import AdminServer, Response, Route
from draftline_server.rpc.calls import Calls
from draftline_server.rpc.drain import Drain
from draftline_server.rpc.health import ServingHealth
from draftline_server.rpc.server import bind, build_server
from draftline_server.rpc.servicer import SERVICE_NAME, InferenceServicer
from draftline_server.runner_thread import EngineHealth, EngineThread

EXIT_DRAINED = 0
EXIT_ENGINE_FAILED = 1
EXIT_INTERRUPTED = 130

_STOP_TIMEOUT_SECONDS = 5.0

BuildPair = Callable[[Config], ServedPair]

_logger = logging.getLogger(__name__)


def run(config: Config, build: BuildPair) -> int:
    """Serves until a signal or a failure; returns the exit code. Raises `StartupError`."""
    server = Server(config, build)
    exit_code = uvloop.run(_run_to_the_end(server))
    if server.engine_thread.is_alive:
        # A thread inside a step or a load cannot be stopped, and must not be torn down under torch's feet.
        log_event(_logger, logging.WARNING, "engine thread was abandoned")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(exit_code)
    return exit_code


async def _run_to_the_end(server: Server) -> int:
    """Once there is nothing left to end, a SIGTERM must not kill the process and hide its exit code."""
    asyncio.get_running_loop().set_exception_handler(log_loop_fault)
    try:
        return await server.run()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def log_loop_fault(_: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Logs a fault that no call gets; asyncio would write arguments and messages, which may quote prompts."""
    error = context.get("exception")
    reason = context.get("message") if error is None else None
    log_event(_logger, logging.ERROR, "event loop had a fault", reason=reason, exc_info=error)


def load_pair(config: Config) -> ServedPair:
    """Checks, plans and loads the configured models. Raises `StartupError`."""
    # Imported here, in the engine's thread: torch takes seconds, in which probes should be answered.
    from draftline_server.engine_factory import build_served_pair
    from draftline_server.model.startup import inspect_models

    inspected = inspect_models(config)
    for note in inspected.notes():
        log_event(_logger, logging.WARNING, "models were inspected", note=note)
    plan = inspected.plan
    log_event(
        _logger,
        logging.INFO,
        "memory was planned",
        device=str(inspected.device),
        limit_bytes=plan.limit_bytes,
        limit_source=plan.budget.source,
        target_weight_bytes=plan.target.weight_bytes,
        draft_weight_bytes=plan.draft.weight_bytes if plan.draft is not None else None,
        target_kv_bytes_per_token=plan.target.kv_bytes_per_token,
        draft_kv_bytes_per_token=plan.draft.kv_bytes_per_token if plan.draft is not None else None,
        logits_bytes=plan.logits_bytes,
        activation_bytes=plan.activation_bytes,
        pool_bytes=plan.pool_bytes,
        pool_tokens=plan.capacity_tokens,
    )
    return build_served_pair(config, inspected)


class Server:
    """One server process. `run` does everything in order."""

    def __init__(self, config: Config, build: BuildPair) -> None:
        """`build` loads the models, in the engine's thread."""
        self._config = config
        self.metrics = ServerMetrics(version=__version__, read_state=self._read_state)
        self.engine_thread = EngineThread(
            lambda: build(config),
            max_concurrent_requests=config.max_running,
            max_queue_length=config.server.max_queue_length,
            hang_seconds=config.server.engine_hang_seconds,
            observe_gap=self.metrics.observe_gap,
        )
        self.frontend = Frontend(
            self.engine_thread,
            request_timeout_seconds=config.server.request_timeout_seconds,
            queue_timeout_seconds=config.server.queue_timeout_seconds,
            max_pending_tokenizations=config.server.max_concurrent_requests,
        )
        self.health = ServingHealth(self.engine_thread, services=("", SERVICE_NAME))
        self.calls = Calls(metrics=self.metrics, request_id_header=config.server.request_id_header)
        self.admin = AdminServer(self._admin_routes())
        self.grpc_port = 0
        self.admin_port = 0
        self.listening = asyncio.Event()
        """Set once both ports are open."""
        self.ready = asyncio.Event()
        """Set once calls are served."""
        self._pair: ServedPair | None = None
        self._signals = Signals()
        self._grpc_server: grpc.aio.Server

    async def run(self) -> int:
        """Serves; returns the exit code. Raises `StartupError`."""
        self._grpc_server = self._build_grpc_server()
        self.grpc_port = bind(self._grpc_server, self._config.server)
        self.admin_port = self.admin.bind(self._config.server)
        self._signals.install()
        self.health.refresh()
        await self.admin.start()
        await self._grpc_server.start()
        log_event(_logger, logging.INFO, "ports opened", grpc_port=self.grpc_port, admin_port=self.admin_port)
        self.listening.set()
        watching = asyncio.create_task(self.health.watch())
        try:
            return await self._load_and_serve()
        finally:
            watching.cancel()
            await self._close()

    def request_stop(self) -> None:
        """Does what SIGTERM does."""
        self._signals.stop.set()

    async def _load_and_serve(self) -> int:
        self.engine_thread.start()
        loading = asyncio.create_task(self.engine_thread.wait_until_ready())
        if not await _first(loading, self._signals.stop):
            log_event(_logger, logging.INFO, "stopped before the models were loaded")
            loading.cancel()
            return EXIT_DRAINED
        pair = await loading
        self._open(pair)
        self.health.refresh()
        self.ready.set()
        log_event(
            _logger,
            logging.INFO,
            "server ready",
            grpc_port=self.grpc_port,
            admin_port=self.admin_port,
            pair_digest=pair.description.pair_digest,
            target=pair.description.target.name,
            draft=pair.description.draft.name if pair.description.draft is not None else None,
            device=pair.description.device,
        )
        return await self._serve()

    def _open(self, pair: ServedPair) -> None:
        self._pair = pair
        self.calls.pair_digest = pair.description.pair_digest
        self.frontend.open(pair)

    async def _serve(self) -> int:
        """Until a signal or a failure, and through the drain."""
        drain = self._build_drain()
        failing = asyncio.create_task(self.engine_thread.failure.wait())
        if not await _first(failing, self._signals.stop):
            draining = asyncio.create_task(drain.run())
            if await _first(draining, self._signals.now) and not self.engine_thread.failure.is_set():
                failing.cancel()
                await draining
                return EXIT_DRAINED
            draining.cancel()
        failing.cancel()
        self.health.refresh()
        await drain.end()
        return EXIT_ENGINE_FAILED if self.engine_thread.failure.is_set() else EXIT_INTERRUPTED

    async def _close(self) -> None:
        self.engine_thread.refuse(lambda: UnavailableError("the server has stopped"))
        await self._grpc_server.stop(None)
        self.frontend.close()
        # A load or a hung step cannot be interrupted, so it is not waited for.
        can_stop = self.engine_thread.health not in (EngineHealth.LOADING, EngineHealth.HUNG)
        await self.engine_thread.stop(_STOP_TIMEOUT_SECONDS if can_stop else 0.0)
        await self.admin.stop()

    def _build_grpc_server(self) -> grpc.aio.Server:
        servicer = InferenceServicer(
            config=self._config,
            frontend=self.frontend,
            engine_thread=self.engine_thread,
            health=self.health,
            calls=self.calls,
        )
        return build_server(
            self._config.server, servicer=servicer, serving_health=self.health, calls=self.calls
        )

    def _build_drain(self) -> Drain:
        return Drain(
            config=self._config.server,
            server=self._grpc_server,
            health=self.health,
            calls=self.calls,
            engine_thread=self.engine_thread,
        )

    def _read_state(self) -> ServerState:
        return ServerState(
            statistics=self.engine_thread.statistics,
            is_draining=self.health.is_draining,
            description=self._pair.description if self._pair is not None else None,
        )

    def _admin_routes(self) -> dict[str, Route]:
        routes: dict[str, Route] = {"/healthz": self._healthz, "/readyz": self._readyz}
        if self._config.observability.enable_metrics:
            routes["/metrics"] = lambda: Response(HTTPStatus.OK, self.metrics.render(), CONTENT_TYPE)
        return routes

    def _healthz(self) -> Response:
        return _probe(is_good=self.health.is_alive, reason=self.health.reason)

    def _readyz(self) -> Response:
        return _probe(is_good=self.health.is_ready, reason=self.health.reason)


class Signals:
    """SIGTERM and SIGINT as events. The first of either drains; a second SIGINT ends at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)

    def _on_terminate(self) -> None:
        if self.stop.is_set():
            log_event(_logger, logging.INFO, "another SIGTERM was ignored: the server is draining")
        self.stop.set()

    def _on_interrupt(self) -> None:
        if self.stop.is_set():
            self.now.set()
        self.stop.set()


def _probe(*, is_good: bool, reason: str) -> Response:
    status = HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(status, f"{reason}\n".encode())


async def _first(task: asyncio.Task[object], event: asyncio.Event) -> bool:
    """Waits for either; True when the task has ended."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        waiting.cancel()
