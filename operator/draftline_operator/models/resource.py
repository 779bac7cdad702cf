"""A SpeculativeDeployment as it was read from the API server, and what is known of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftline_operator.models.spec import SpeculativeDeploymentSpec

Manifest = dict[str, Any]
"""A Kubernetes object as it is applied: only the fields that are ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Identity and parsed spec."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: SpeculativeDeploymentSpec
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderSettings:
    """What the operator's own configuration says about children."""

    default_image: str
    image_pull_policy: str = "IfNotPresent"
    allow_host_path: bool = False
    """Whether file:// models may be mounted from nodes."""
    autoscaling_provider: str = "builtin"
    """builtin, keda, prometheus-adapter or none."""
    has_keda: bool = True
    """Whether KEDA's kinds are there."""
    has_service_monitor: bool = False
    """Whether the ServiceMonitor kind is there and wanted."""
    service_monitor_labels: Mapping[str, str] = field(default_factory=dict)
    """By which a Prometheus selects ServiceMonitors."""
    network_policy: bool = True
    operator_namespace: str = "default"
    """Where scrapes come from."""
    metrics_url: str = ""
    """Base of the operator's plain HTTP port, for KEDA, such as http://draftline.draftline-system.svc:8080."""
    knows_nodes: bool = True
    """Whether the operator may read them: one of single namespaces may not."""
    has_hpa_tolerance: bool = False
    """Whether the cluster's autoscaler knows behavior.scaleDown.tolerance (Kubernetes 1.35 and later)."""
