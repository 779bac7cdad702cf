"""All children that a resource is to have, given what was decided."""

from __future__ import annotations

from draftline_operator.models.preflight import PreflightResult
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.resources.config_map import render_config_map
from draftline_operator.resources.deployment import render_deployment
from draftline_operator.resources.horizontal_pod_autoscaler import render_horizontal_pod_autoscaler
from draftline_operator.resources.network_policy import render_network_policy
from draftline_operator.resources.pod_disruption_budget import render_pod_disruption_budget
from draftline_operator.resources.preflight_job import render_preflight_job
from draftline_operator.resources.scaled_object import render_scaled_object
from draftline_operator.resources.service_account import render_service_account
from draftline_operator.resources.service_monitor import render_service_monitor
from draftline_operator.resources.services import render_client_service, render_headless_service


def render_surroundings(resource: Resource, settings: RenderSettings) -> list[Manifest]:
    """What does not depend on the pair: all but the pods and their configuration."""
    manifests = [
        render_service_account(resource),
        render_client_service(resource),
        render_headless_service(resource),
        render_pod_disruption_budget(resource),
    ]
    if settings.network_policy:
        manifests.append(render_network_policy(resource, settings))
    if settings.has_service_monitor:
        manifests.append(render_service_monitor(resource, settings))
    if resource.spec.autoscaling is not None:
        match settings.autoscaling_provider:
            case "builtin" | "prometheus-adapter":
                manifests.append(render_horizontal_pod_autoscaler(resource, settings))
            case "keda" if settings.has_keda:
                manifests.append(render_scaled_object(resource, settings))
    return manifests


def render_preflight(
    resource: Resource, settings: RenderSettings, *, accelerator_memory_bytes: int | None
) -> list[Manifest]:
    """The Job, and before it the configuration that it reads."""
    job = render_preflight_job(resource, settings, accelerator_memory_bytes=accelerator_memory_bytes)
    return [render_config_map(resource, pair_digest=None), job]


def render_workload(
    resource: Resource,
    settings: RenderSettings,
    *,
    result: PreflightResult,
    replicas: int,
    secrets_hash: str | None,
) -> list[Manifest]:
    """The Deployment of a verified pair, and before it the configuration that its pods read."""
    deployment = render_deployment(
        resource,
        settings,
        pair_digest=result.pair_digest,
        replicas=replicas,
        secrets_hash=secrets_hash,
        verified=result,
    )
    return [render_config_map(resource, pair_digest=result.pair_digest), deployment]
