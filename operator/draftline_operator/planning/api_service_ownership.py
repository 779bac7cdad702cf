"""Whether the APIServices of custom.metrics.k8s.io lead to us. Pure.

The group belongs to one server of the whole cluster. The autoscaler asks the version that discovery prefers,
whoever serves it: so one version in other hands is a conflict, even while the other one is ours.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftline_operator.models.observed import Object


@dataclass(frozen=True, slots=True)
class ServiceReference:
    """The Service that an APIService leads to."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class MetricsApiState:
    """What an AutoscalingActive condition has to know: whether the autoscaler can read our metrics."""

    status: Literal["ok", "conflict", "unavailable"]
    detail: str = ""
    """For people: who owns the group, or what is missing."""


OK = MetricsApiState("ok")


def judge_api_services(found: Mapping[str, Object | None], ours: ServiceReference) -> MetricsApiState:
    """The state of the group, from its APIServices by name; None where there is none."""
    for name, api_service in found.items():
        if api_service is not None and not is_ours(api_service, ours):
            return MetricsApiState("conflict", f"APIService {name} belongs to {_owner(api_service)}")
    for name, api_service in found.items():
        if api_service is None:
            return MetricsApiState("unavailable", f"APIService {name} is not registered")
        if reason := _unavailability(api_service):
            return MetricsApiState("unavailable", f"APIService {name}: {reason}")
    return OK


def is_ours(api_service: Object, ours: ServiceReference) -> bool:
    service = api_service["spec"].get("service") or {}
    return ServiceReference(service.get("namespace", ""), service.get("name", "")) == ours


def has_bundle(api_service: Object, ca_bundle: bytes) -> bool:
    return bool(api_service["spec"].get("caBundle") == base64.b64encode(ca_bundle).decode())


def _owner(api_service: Object) -> str:
    service = api_service["spec"].get("service")
    if not service:
        return "the API server itself"
    return f"Service {ServiceReference(service.get('namespace', ''), service.get('name', ''))}"


def _unavailability(api_service: Object) -> str:
    """Why the API server does not reach us; empty where it does."""
    conditions: list[dict[str, Any]] = api_service.get("status", {}).get("conditions", [])
    available = next((condition for condition in conditions if condition.get("type") == "Available"), None)
    if available is None:
        return "the API server has not tried it yet"
    if available.get("status") == "True":
        return ""
    return f"{available.get('reason', 'Unavailable')}: {available.get('message', '')}".rstrip(": ")
