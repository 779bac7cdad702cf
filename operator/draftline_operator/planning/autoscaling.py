"""What can be said about autoscaling, from what the autoscaler says about itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from draftline_operator.constants import KIND
from draftline_operator.models.kinds import HORIZONTAL_POD_AUTOSCALER, SCALED_OBJECT
from draftline_operator.models.observed import Object, Observed, controller_of
from draftline_operator.models.status import Condition, ConditionStatus, ConditionType
from draftline_operator.planning.api_service_ownership import MetricsApiState

DEGRADED: Final = "AutoscalingDegraded"
"""Metrics are missing: replicas stay as they are."""


def autoscaling_condition(
    observed: Observed,
    *,
    is_wanted: bool,
    provider: str,
    has_keda: bool,
    wanted_replicas: int,
    metrics_api: MetricsApiState | None,
) -> Condition:
    """`metrics_api` is None where the operator does not serve the metrics itself."""
    if other := _other_autoscaler(observed):
        return _condition("False", "OtherAutoscaler", f"{other} scales the same pods")
    if not is_wanted:
        return _condition("False", "NotConfigured", "spec.autoscaling is not set")
    if provider == "none":
        return _condition("False", "ProviderDisabled", "the operator runs without an autoscaling provider")
    if provider == "keda" and not has_keda:
        return _condition(
            "False", "ProviderDisabled", "KEDA, the operator's autoscaling provider, is not installed"
        )
    if wanted_replicas == 0:
        return _condition("False", "ScaledToZero", "replicas is 0: the autoscaler leaves that alone")
    if metrics_api is not None and metrics_api.status == "conflict":
        return _condition("False", "MetricsApiConflict", metrics_api.detail)
    if provider == "keda":
        return _of_scaled_object(observed.own(SCALED_OBJECT, observed.name))
    return _of_autoscaler(observed.own(HORIZONTAL_POD_AUTOSCALER, observed.name))


def _of_autoscaler(autoscaler: Object | None) -> Condition:
    """ScalingActive says whether the metrics can be read, AbleToScale whether replicas can be written."""
    conditions = _conditions(autoscaler)
    able, active = conditions.get("AbleToScale", {}), conditions.get("ScalingActive", {})
    if able.get("status") == "False" and able.get("reason") in ("FailedGetScale", "FailedUpdateScale"):
        return _condition("False", DEGRADED, f"the autoscaler reports {able['reason']}")
    if active.get("status") == "True":
        return _condition("True", "ValidMetricFound", "replicas follow the load")
    if active.get("status") == "False":
        return _condition("False", DEGRADED, f"the autoscaler reports {active.get('reason')}; replicas stay")
    return _condition("Unknown", "Pending", "the autoscaler has not reported yet")


def _of_scaled_object(scaled_object: Object | None) -> Condition:
    ready = _conditions(scaled_object).get("Ready", {})
    if ready.get("status") == "True":
        return _condition("True", "ScaledObjectReady", "replicas follow the load")
    if ready.get("status") == "False":
        return _condition("False", DEGRADED, f"KEDA reports {ready.get('reason')}; replicas stay")
    return _condition("Unknown", "Pending", "KEDA has not reported yet")


def _other_autoscaler(observed: Observed) -> str | None:
    """One that scales the resource or its Deployment, and is neither ours nor KEDA's for us."""
    ours = observed.own(SCALED_OBJECT, observed.name)
    for autoscaler in observed.autoscalers:
        target = autoscaler["spec"]["scaleTargetRef"]
        if target.get("kind") not in (KIND, "Deployment") or target.get("name") != observed.name:
            continue
        controller = controller_of(autoscaler) or {}
        owners = {observed.uid, ours["metadata"]["uid"] if ours is not None else observed.uid}
        if controller.get("uid") not in owners:
            return f"HorizontalPodAutoscaler {autoscaler['metadata']['name']}"
    return None


def _conditions(found: Object | None) -> Mapping[str, Mapping[str, Any]]:
    status = found.get("status", {}) if found is not None else {}
    return {condition["type"]: condition for condition in status.get("conditions") or ()}


def _condition(status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(ConditionType.AUTOSCALING_ACTIVE, status, reason, message)
