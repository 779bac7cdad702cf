"""The same autoscaling through KEDA, which makes the HorizontalPodAutoscaler itself.

KEDA reads the totals from the operator: GET {metrics_url}/queue/NAMESPACE/NAME answers a JSON object with the
two metrics by name.
"""

from __future__ import annotations

from draftline_operator import constants
from draftline_operator.models.names import serving_name
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.resources.labels import object_metadata
from draftline_operator.resources.scaling_behavior import scaling_behavior

_POLLING_SECONDS = 15
_PAUSED = {"autoscaling.keda.sh/paused": "true"}
"""Of a resource with 0 replicas, which KEDA would else raise to the least at its next poll.

With `paused-replicas` KEDA would write a number itself, also over the one that ends the pause.
"""


def render_scaled_object(resource: Resource, settings: RenderSettings) -> Manifest:
    """Only of a resource with spec.autoscaling. A total that is missing leaves the replicas as they are."""
    autoscaling = resource.spec.autoscaling
    assert autoscaling is not None, "without autoscaling there is no autoscaler"
    behavior = scaling_behavior(autoscaling, has_tolerance=settings.has_hpa_tolerance)
    url = f"{settings.metrics_url.rstrip('/')}/queue/{resource.namespace}/{resource.name}"
    metadata = object_metadata(resource, serving_name(resource.name))
    if resource.spec.replicas == 0:
        metadata["annotations"] = dict(_PAUSED)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": {
                "apiVersion": constants.API_VERSION,
                "kind": constants.KIND,
                "name": resource.name,
            },
            "pollingInterval": _POLLING_SECONDS,
            "minReplicaCount": autoscaling.min_replicas,
            "maxReplicaCount": autoscaling.max_replicas,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [
                _trigger(url, constants.WAITING_METRIC, autoscaling.queue_depth.high_watermark),
                _trigger(url, constants.RUNNING_METRIC, resource.spec.serving.max_concurrent_requests),
            ],
        },
    }


def _trigger(url: str, metric: str, average: int) -> Manifest:
    return {
        "type": "metrics-api",
        "metricType": "AverageValue",
        "metadata": {"url": url, "format": "json", "valueLocation": metric, "targetValue": str(average)},
    }
