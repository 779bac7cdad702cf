"""The operator's own custom.metrics.k8s.io: what the autoscaler reads of a SpeculativeDeployment.

    HPA ── API server ── (APIService, TLS) ── here ── the load that the operator scrapes

Runs on every replica of the operator, leading or not: an API group that nobody serves blocks the deletion of
namespaces in the whole cluster.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import logging
import socket
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from draftline_operator.cluster.interface import Cluster
from draftline_operator.errors import ClusterError, OperatorError
from draftline_operator.log import log_event
from draftline_operator.models.kinds import API_SERVICE, CONFIG_MAP
from draftline_operator.models.observed import Object
from draftline_operator.planning.api_service_ownership import (
    MetricsApiState,
    ServiceReference,
    has_bundle,
    is_ours,
    judge_api_services,
)
from draftline_operator.planning.front_proxy import (
    AUTHENTICATION_CONFIG_MAP,
    AUTHENTICATION_NAMESPACE,
    FrontProxy,
    parse_front_proxy,
)
from draftline_operator.planning.metrics_documents import METRICS_VERSIONS, api_service_name
from draftline_operator.services.access_reviews import AccessReviews
from draftline_operator.services.metrics_requests import LoadSource, MetricsRequests
from draftline_operator.services.serving_certificate import ServingCertificate, ensure_certificate

_CHECKED_EVERY_SECONDS: Final = 30.0
_RETRIED_AFTER_SECONDS: Final = 2.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsApiSettings:
    """Where the API is served, and the Service and Secret that the chart made for it."""

    namespace: str
    service: str
    secret: str
    host: str = "0.0.0.0"
    port: int = 8443
    max_load_age_seconds: float = 30.0
    """A load sampled longer ago is not told."""

    @property
    def reference(self) -> ServiceReference:
        return ServiceReference(self.namespace, self.service)

    @property
    def dns_names(self) -> tuple[str, ...]:
        """The API server asks for the first; the others are for people."""
        return (f"{self.service}.{self.namespace}.svc", f"{self.service}.{self.namespace}", self.service)


class MetricsApi:
    """Serves until `run` is cancelled; follows certificate, APIServices and the API server's authorities."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        loads: LoadSource,
        settings: MetricsApiSettings,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives Unix seconds."""
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._requests = MetricsRequests(
            loads=loads,
            reviews=AccessReviews(cluster, clock),
            front_proxy=lambda: self._proxy,
            clock=clock,
            max_load_age_seconds=settings.max_load_age_seconds,
        )
        self._proxy: FrontProxy | None = None
        self._certificate: ServingCertificate | None = None
        self._site: web.SockSite | None = None
        self._state = MetricsApiState("unavailable", "the metrics API is starting")

    def state(self) -> MetricsApiState:
        """Whether the autoscaler can read metrics here, for conditions."""
        return self._state

    async def run(self) -> None:
        """Raises OSError at once where the port is taken; afterwards only what it can never get over."""
        settings = self._settings
        with socket.create_server((settings.host, settings.port), backlog=128) as listener:
            runner = web.AppRunner(self._requests.application(), access_log=None, shutdown_timeout=5)
            await runner.setup()
            delay = _RETRIED_AFTER_SECONDS
            try:
                while True:
                    await self._check(runner, listener)
                    is_settled = self._state.status != "unavailable"
                    await asyncio.sleep(_CHECKED_EVERY_SECONDS if is_settled else delay)
                    delay = _RETRIED_AFTER_SECONDS if is_settled else min(2 * delay, _CHECKED_EVERY_SECONDS)
            finally:
                await runner.cleanup()

    async def _check(self, runner: web.AppRunner, listener: socket.socket) -> None:
        before = self._state
        try:
            self._state = await self._refresh(runner, listener)
        except ssl.SSLError as error:  # of the Secret or of the API server, as somebody has written it
            self._state = MetricsApiState("unavailable", f"a certificate cannot be used: {error}")
        except (OperatorError, ValueError) as error:
            self._state = MetricsApiState("unavailable", str(error))
        if self._state != before:
            level = logging.INFO if self._state.status == "ok" else logging.WARNING
            log_event(
                _logger,
                level,
                "metrics API changed",
                status=self._state.status,
                detail=self._state.detail or None,
            )

    async def _refresh(self, runner: web.AppRunner, listener: socket.socket) -> MetricsApiState:
        settings = self._settings
        proxy = await self._read_front_proxy()
        certificate = await ensure_certificate(
            self._cluster,
            namespace=settings.namespace,
            name=settings.secret,
            dns_names=settings.dns_names,
            now=datetime.datetime.fromtimestamp(self._clock(), tz=datetime.UTC),
        )
        # First the API server learns to trust a new certificate, then it is shown to it.
        state = await self._register(certificate.bundle)
        if (proxy, certificate) != (self._proxy, self._certificate):
            await self._listen(runner, listener, proxy, certificate)
        return state

    async def _read_front_proxy(self) -> FrontProxy:
        place = (AUTHENTICATION_NAMESPACE, AUTHENTICATION_CONFIG_MAP)
        config_map = await self._cluster.get(CONFIG_MAP, *place)
        if config_map is None:
            raise ClusterError(f"ConfigMap {'/'.join(place)} is missing")
        return parse_front_proxy(config_map.get("data") or {})

    async def _register(self, ca_bundle: bytes) -> MetricsApiState:
        """Puts the bundle into our APIServices; anybody else's is only reported."""
        found: dict[str, Object | None] = {}
        for version in METRICS_VERSIONS:
            name = api_service_name(version)
            found[name] = api_service = await self._cluster.get(API_SERVICE, None, name)
            if (
                api_service is not None
                and is_ours(api_service, self._settings.reference)
                and not has_bundle(api_service, ca_bundle)
            ):
                await self._cluster.patch(API_SERVICE, None, name, _bundle_change(api_service, ca_bundle))
        return judge_api_services(found, self._settings.reference)

    async def _listen(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        proxy: FrontProxy,
        certificate: ServingCertificate,
    ) -> None:
        """Takes new connections under a new certificate; nobody is turned away, for the socket stays open."""
        context = server_context(certificate, proxy)
        site = web.SockSite(runner, listener.dup(), ssl_context=context)
        if self._site is not None:
            await self._site.stop()
        await site.start()
        self._site, self._proxy, self._certificate = site, proxy, certificate


def server_context(certificate: ServingCertificate, proxy: FrontProxy) -> ssl.SSLContext:
    """TLS with the given certificate, asking for the API server's; probes come without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=proxy.ca)
    with tempfile.TemporaryDirectory() as folder:  # OpenSSL takes nothing but files
        path = Path(folder, "serving.pem")
        path.touch(mode=0o600)
        path.write_bytes(certificate.private_key + certificate.certificate)
        context.load_cert_chain(path)
    return context


async def unregister(cluster: Cluster, ours: ServiceReference) -> list[str]:
    """Deletes the APIServices that lead to us, so that none is left without a server; returns their names."""
    deleted = []
    for version in METRICS_VERSIONS:
        name = api_service_name(version)
        api_service = await cluster.get(API_SERVICE, None, name)
        if api_service is not None and is_ours(api_service, ours):
            resource_version = api_service["metadata"]["resourceVersion"]
            await cluster.delete(API_SERVICE, None, name, resource_version=resource_version)
            deleted.append(name)
    return deleted


def _bundle_change(api_service: Object, ca_bundle: bytes) -> Object:
    """Only of the APIService as it was read: somebody who takes it over in between is not overwritten."""
    return {
        "metadata": {"resourceVersion": api_service["metadata"]["resourceVersion"]},
        "spec": {"caBundle": base64.b64encode(ca_bundle).decode()},
    }
