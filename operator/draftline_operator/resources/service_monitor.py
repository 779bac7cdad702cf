"""What tells a Prometheus of the prometheus-operator to scrape the pods."""

from __future__ import annotations

from draftline_operator.models.names import serving_name
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.resources.labels import object_metadata, selector_labels


def render_service_monitor(resource: Resource, settings: RenderSettings) -> Manifest:
    """Only the headless Service has a port named admin, so each pod is scraped once.

    Series carry the resource's name as the label speculativedeployment, by which prometheus-adapter finds the
    object that they describe.
    """
    metadata = object_metadata(resource, serving_name(resource.name))
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {**metadata, "labels": {**settings.service_monitor_labels, **metadata["labels"]}},
        "spec": {
            "selector": {"matchLabels": selector_labels(resource.name)},
            "endpoints": [
                {
                    "port": "admin",
                    "path": "/metrics",
                    "interval": "15s",
                    "relabelings": [
                        {
                            "sourceLabels": ["__meta_kubernetes_service_label_app_kubernetes_io_instance"],
                            "targetLabel": "speculativedeployment",
                        }
                    ],
                }
            ],
        },
    }
