"""The operator's own small HTTP server: /healthz, /readyz, /metrics, and totals for KEDA.

Healthy means that the event loop turns: whatever else can break ends the process. The one that leads and the
one that stands by are both ready.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from draftline_operator.constants import RUNNING_METRIC, WAITING_METRIC
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.services.load import LoadCache


class HealthServer:
    """`is_ready` says whether the cluster was reached once."""

    def __init__(
        self,
        *,
        loads: LoadCache,
        metrics: OperatorMetrics,
        is_ready: Callable[[], bool],
    ) -> None:
        self._loads = loads
        self._metrics = metrics
        self._is_ready = is_ready
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port, which was picked where 0 was asked for."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._render_metrics),
                web.get("/queue/{namespace}/{name}", self._queue),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        is_ready = self._is_ready()
        return web.Response(text="ok\n" if is_ready else "not ready\n", status=200 if is_ready else 503)

    async def _render_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), content_type="text/plain", charset="utf-8")

    async def _queue(self, request: web.Request) -> web.Response:
        """A total that is not known is no zero: KEDA leaves the replicas alone upon an error."""
        load = self._loads.of(request.match_info["namespace"], request.match_info["name"])
        if load is None:
            return web.json_response({"error": "the load is not known"}, status=404)
        return web.json_response({WAITING_METRIC: load.waiting, RUNNING_METRIC: load.running})
