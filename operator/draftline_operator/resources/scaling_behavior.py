"""How fast replicas follow the load: up at once, down slowly and not while enough of it is left."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from draftline_operator.models.quantity import canonical_quantity
from draftline_operator.models.schema import as_object
from draftline_operator.models.spec import AutoscalingSpec

# The autoscaler's own share of 1 would hold the replicas even without any load.
_MAX_TOLERANCE = Decimal("0.999")


def scaling_behavior(autoscaling: AutoscalingSpec, *, has_tolerance: bool) -> dict[str, Any]:
    """autoscaling/v2 HorizontalPodAutoscalerBehavior; a direction that is given replaces its default."""
    given = autoscaling.behavior or {}
    for direction, rules in given.items():
        as_object(rules, f"spec.autoscaling.behavior.{direction}")
    behavior: dict[str, Any] = {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "selectPolicy": "Max",
            "policies": [{"type": "Pods", "value": autoscaling.max_replicas, "periodSeconds": 15}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": 300,
            "selectPolicy": "Min",
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
        },
        **given,
    }
    if has_tolerance:
        behavior["scaleDown"] = {"tolerance": _tolerance(autoscaling), **behavior["scaleDown"]}
    return behavior


def _tolerance(autoscaling: AutoscalingSpec) -> str:
    """How far load may fall below the target and still hold the replicas: down to low by high watermark."""
    depth = autoscaling.queue_depth
    share = Decimal(depth.low_watermark) / Decimal(depth.high_watermark)
    return canonical_quantity(str(min(1 - share, _MAX_TOLERANCE).quantize(Decimal("0.001"))))
