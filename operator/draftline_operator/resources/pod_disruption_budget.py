"""What evictions may take. Never so little that the drain of a node would wait for ever."""

from __future__ import annotations

from draftline_operator.models.names import serving_name
from draftline_operator.models.resource import Manifest, Resource
from draftline_operator.resources.labels import object_metadata, selector_labels


def render_pod_disruption_budget(resource: Resource) -> Manifest:
    """By maxUnavailable, which follows the replicas by itself; pods that are broken anyway may always go."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": object_metadata(resource, serving_name(resource.name)),
        "spec": {
            "maxUnavailable": resource.spec.disruption.max_unavailable,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector_labels(resource.name)},
        },
    }
