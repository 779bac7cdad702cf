"""The operator's own settings: flags, else the environment, else defaults. Read once, at the start.

Every field is a flag and a variable: ``health_port`` is ``--health-port`` and
``DRAFTLINE_OPERATOR_HEALTH_PORT``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from draftline_operator.errors import OperatorError

ENVIRONMENT_PREFIX: Final = "DRAFTLINE_OPERATOR_"


class SettingsError(OperatorError):
    """A setting that makes no sense, by its name."""


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _none_if_empty(value: Any) -> Any:
    return None if value == "" else value


def _pairs(value: Any) -> Any:
    """Whatever has no equals sign is left for pydantic to refuse."""
    parts = _split(value)
    if not isinstance(parts, tuple) or not all("=" in part for part in parts):
        return value
    return dict(part.split("=", 1) for part in parts)


Labels = Annotated[dict[str, str], BeforeValidator(_pairs)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
OptionalName = Annotated[str | None, BeforeValidator(_none_if_empty)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseModel):
    """Docstrings of fields are the help texts of the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kubeconfig: OptionalName = None
    """file that says how to reach the cluster; default: the pod's own account, else as kubectl does"""
    namespace: str = "default"
    """namespace of the operator itself, with its Lease"""
    pod_name: OptionalName = None
    """name under which the Lease is held; default: the host's"""
    watch_namespaces: Names = ()
    """namespaces to watch, separated by commas; default: all"""
    lease_name: str = "draftline-operator"
    """Lease by which one of several operators acts"""
    lease_seconds: Annotated[int, Field(ge=3, le=300)] = 15
    """the next operator acts after the Lease was not renewed for so long"""
    health_host: str = "0.0.0.0"
    """address of /healthz, /readyz and /metrics"""
    health_port: Port = 8080
    """port of /healthz, /readyz and /metrics"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug, info, warning or error"""
    log_format: Literal["json", "text"] = "json"
    """json or text"""
    default_image: str = "draftline/server:latest"
    """image of serving pods whose resource names none"""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """of serving pods: Always, IfNotPresent or Never"""
    allow_host_path: bool = False
    """whether file:// models may be mounted from nodes"""
    network_policy: bool = True
    """whether serving pods get a NetworkPolicy"""
    service_monitor: bool = True
    """whether resources get a ServiceMonitor where that kind is installed"""
    service_monitor_labels: Labels = {}
    """further labels of ServiceMonitors, such as release=prometheus, separated by commas"""
    autoscaling_provider: Literal["builtin", "keda", "prometheus-adapter", "none"] = "none"
    """who serves the autoscaler's metrics: builtin, keda, prometheus-adapter or none"""
    metrics_api_service: OptionalName = None
    """Service through which the API server reaches the metrics API; default: it is not served"""
    metrics_api_secret: OptionalName = None
    """Secret for the metrics API's certificate"""
    metrics_api_host: str = "0.0.0.0"
    """address of the metrics API"""
    metrics_api_port: Port = 8443
    """port of the metrics API"""
    metrics_url: OptionalName = None
    """where KEDA finds this operator's health port; default: the Service that is named like the Lease"""
    resync_seconds: Annotated[float, Field(ge=1)] = 300
    """every resource is looked at this often, whatever happens"""
    scrape_seconds: Annotated[float, Field(ge=0.1)] = 3
    """serving pods are asked for their load this often"""
    figures_seconds: Annotated[float, Field(ge=1)] = 30
    """live figures of a status are written at most this often"""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 8
    """resources that are reconciled at once"""

    @pydantic.model_validator(mode="after")
    def _metrics_api_is_whole(self) -> Settings:
        if (self.metrics_api_service is None) != (self.metrics_api_secret is None):
            raise ValueError("metrics_api_service and metrics_api_secret need each other")
        return self


def load_settings(flags: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
    """`flags` are those that were given, by field; raises `SettingsError` with one line."""
    variables = {name: f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in Settings.model_fields}
    given = {name: environment[variable] for name, variable in variables.items() if variable in environment}
    try:
        return Settings.model_validate({**given, **flags})
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        where = _flag(field) if field in flags else variables.get(field, "settings")
        raise SettingsError(f"{where}: {str(first['msg']).removeprefix('Value error, ')}") from error


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
