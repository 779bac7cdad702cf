"""What the cluster offers, looked at now and then: kinds of other projects come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from draftline_operator.cluster.interface import Cluster
from draftline_operator.cluster.observe import OPTIONAL_KINDS
from draftline_operator.errors import OperatorError
from draftline_operator.log import log_event
from draftline_operator.models.kinds import SCALED_OBJECT, SERVICE_MONITOR, Kind
from draftline_operator.models.resource import RenderSettings
from draftline_operator.settings import Settings

_TOLERANCE_SINCE = 35
_logger = logging.getLogger(__name__)


class Capabilities:
    """`look` has to have succeeded once before anything else is asked."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._kinds: frozenset[Kind] = frozenset()
        self._minor = 0

    async def look(self) -> None:
        served = [await self._cluster.serves(kind) for kind in OPTIONAL_KINDS]
        self._kinds = frozenset(kind for kind, found in zip(OPTIONAL_KINDS, served, strict=True) if found)
        self._minor = await self._cluster.minor_version()

    async def follow(self, interval: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(interval)
            try:
                await self.look()
            except OperatorError as error:
                log_event(_logger, logging.WARNING, "cluster was not looked at", error=str(error))

    def optional_kinds(self) -> Collection[Kind]:
        return self._kinds

    def render_settings(self) -> RenderSettings:
        settings = self._settings
        return RenderSettings(
            default_image=settings.default_image,
            image_pull_policy=settings.image_pull_policy,
            allow_host_path=settings.allow_host_path,
            autoscaling_provider=settings.autoscaling_provider,
            has_keda=SCALED_OBJECT in self._kinds,
            has_service_monitor=settings.service_monitor and SERVICE_MONITOR in self._kinds,
            service_monitor_labels=settings.service_monitor_labels,
            network_policy=settings.network_policy,
            operator_namespace=settings.namespace,
            metrics_url=settings.metrics_url
            or f"http://{settings.lease_name}.{settings.namespace}.svc:{settings.health_port}",
            knows_nodes=not settings.watch_namespaces,
            has_hpa_tolerance=self._minor >= _TOLERANCE_SINCE,
        )
