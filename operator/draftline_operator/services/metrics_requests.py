"""Answers what the API server passes on to custom.metrics.k8s.io.

The API server proves itself by a client certificate and names the caller in headers; what the caller may
read is asked back by a SubjectAccessReview. A load that is unknown or old is a 404, upon which the autoscaler
leaves the replicas as they are: a number that nobody vouches for never scales anything.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from aiohttp import web

from draftline_operator.constants import RUNNING_METRIC
from draftline_operator.errors import OperatorError
from draftline_operator.log import log_event
from draftline_operator.models.load import ResourceLoad
from draftline_operator.planning.front_proxy import Caller, FrontProxy, identify
from draftline_operator.planning.metrics_documents import (
    METRICS,
    METRICS_GROUP,
    METRICS_RESOURCE,
    METRICS_VERSIONS,
    MetricsVersion,
    StatusReason,
    api_group,
    api_group_list,
    failure,
    metric_value_list,
    resource_list,
)
from draftline_operator.services.access_reviews import AccessReviews

_PROBES: Final = ("/healthz", "/livez", "/readyz")
_GROUP_PATH: Final = f"/apis/{METRICS_GROUP}"
_METRIC_PATH: Final = (
    f"{_GROUP_PATH}/{{version}}/namespaces/{{namespace}}/{METRICS_RESOURCE}/{{name}}/{{metric}}"
)
_CALLER: Final = web.RequestKey("caller", Caller)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_logger = logging.getLogger(__name__)


class LoadSource(Protocol):
    """Where the figures come from."""

    def of(self, namespace: str, name: str) -> ResourceLoad | None: ...


class MetricsRequests:
    """`front_proxy` is asked with each request, since the API server may change its authorities."""

    def __init__(
        self,
        *,
        loads: LoadSource,
        reviews: AccessReviews,
        front_proxy: Callable[[], FrontProxy | None],
        clock: Callable[[], float],
        max_load_age_seconds: float,
    ) -> None:
        self._loads = loads
        self._reviews = reviews
        self._front_proxy = front_proxy
        self._clock = clock
        self._max_load_age_seconds = max_load_age_seconds

    def application(self) -> web.Application:
        application = web.Application(middlewares=[_answer_in_status_documents, self._authenticate])
        application.add_routes(
            [
                *(web.get(path, _probe) for path in _PROBES),
                web.get("/apis", _groups),
                web.get(_GROUP_PATH, _group),
                web.get(f"{_GROUP_PATH}/{{version}}", _resources),
                web.get(_METRIC_PATH, self._metric),
            ]
        )
        return application

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path in _PROBES:
            return await handler(request)
        proxy, caller = self._front_proxy(), None
        if proxy is not None:
            caller = identify(proxy, common_name=_common_name(request), headers=request.headers.items())
        if caller is None:
            return _failed("Unauthorized", "only the API server may ask, with its client certificate")
        request[_CALLER] = caller
        return await handler(request)

    async def _metric(self, request: web.Request) -> web.Response:
        version = _version(request)
        namespace, name, metric = (request.match_info[key] for key in ("namespace", "name", "metric"))
        caller = request[_CALLER]
        attributes = {
            "verb": "get",
            "group": METRICS_GROUP,
            "version": version,
            "resource": METRICS_RESOURCE,
            "subresource": metric,
            "namespace": namespace,
            "name": name,
        }
        if not await self._reviews.allows(caller, attributes):
            return _failed("Forbidden", f"{caller.username} may not get {metric} in namespace {namespace}")
        if request.query.get("metricLabelSelector"):
            return _failed("NotFound", f"{metric} has no labels to select by")
        load = self._loads.of(namespace, name)
        if load is None or metric not in METRICS:
            return _failed("NotFound", f"there is no {metric} of {METRICS_RESOURCE} {namespace}/{name}")
        age = self._clock() - load.sampled_at
        if age > self._max_load_age_seconds:
            return _failed("NotFound", f"{metric} of {namespace}/{name} was last seen {age:.0f} s ago")
        document = metric_value_list(
            version,
            namespace=namespace,
            name=name,
            metric=metric,
            value=load.running if metric == RUNNING_METRIC else load.waiting,
            sampled_at=load.sampled_at,
        )
        return web.json_response(document)


@web.middleware
async def _answer_in_status_documents(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed:
        return _failed("MethodNotAllowed", "only GET is served")
    except web.HTTPNotFound:
        return _failed("NotFound", f"there is nothing at {request.path}")
    except OperatorError as error:
        return _failed("ServiceUnavailable", str(error))
    except Exception as error:
        log_event(_logger, logging.ERROR, "metrics request failed", path=request.path, exc_info=error)
        return _failed("InternalError", "internal error")


async def _probe(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _groups(_: web.Request) -> web.Response:
    return web.json_response(api_group_list())


async def _group(_: web.Request) -> web.Response:
    return web.json_response(api_group())


async def _resources(request: web.Request) -> web.Response:
    return web.json_response(resource_list(_version(request)))


def _version(request: web.Request) -> MetricsVersion:
    asked = request.match_info["version"]
    for version in METRICS_VERSIONS:
        if version == asked:
            return version
    raise web.HTTPNotFound


def _common_name(request: web.Request) -> str | None:
    """Of the client's certificate, which the TLS layer has verified; None without one."""
    certificate = request.get_extra_info("peercert") or {}
    names = (pair for attributes in certificate.get("subject", ()) for pair in attributes)
    return next((str(value) for kind, value in names if kind == "commonName"), None)


def _failed(reason: StatusReason, message: str) -> web.Response:
    document = failure(reason, message)
    return web.json_response(document, status=document["code"])
