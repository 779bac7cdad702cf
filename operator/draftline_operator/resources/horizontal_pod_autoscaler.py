"""The HorizontalPodAutoscaler: it scales the resource itself, on totals over all pods.

AverageValue of a total asks for total / target pods, whatever pods are starting or leaving; the second metric
holds pods under load when the queue is empty for a moment.
"""

from __future__ import annotations

from draftline_operator import constants
from draftline_operator.models.names import serving_name
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.resources.labels import object_metadata
from draftline_operator.resources.scaling_behavior import scaling_behavior


def render_horizontal_pod_autoscaler(resource: Resource, settings: RenderSettings) -> Manifest:
    """Only of a resource with spec.autoscaling."""
    autoscaling = resource.spec.autoscaling
    assert autoscaling is not None, "without autoscaling there is no autoscaler"
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": object_metadata(resource, serving_name(resource.name)),
        "spec": {
            "scaleTargetRef": _reference(resource),
            "minReplicas": autoscaling.min_replicas,
            "maxReplicas": autoscaling.max_replicas,
            "metrics": [
                _metric(resource, constants.WAITING_METRIC, autoscaling.queue_depth.high_watermark),
                _metric(resource, constants.RUNNING_METRIC, resource.spec.serving.max_concurrent_requests),
            ],
            "behavior": scaling_behavior(autoscaling, has_tolerance=settings.has_hpa_tolerance),
        },
    }


def _reference(resource: Resource) -> Manifest:
    return {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "name": resource.name}


def _metric(resource: Resource, name: str, average: int) -> Manifest:
    return {
        "type": "Object",
        "object": {
            "describedObject": _reference(resource),
            "metric": {"name": name},
            "target": {"type": "AverageValue", "averageValue": str(average)},
        },
    }
