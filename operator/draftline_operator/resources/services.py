"""The two Services: one address for clients, and one name that lists every pod.

A ClusterIP pins each HTTP/2 connection to a pod; clients that balance by themselves resolve the headless one.
The admin port is on the latter only, so that a scrape finds each pod once.
"""

from __future__ import annotations

from typing import Any

from draftline_operator import constants
from draftline_operator.models.names import headless_service_name, serving_name
from draftline_operator.models.resource import Manifest, Resource
from draftline_operator.resources.labels import object_metadata, selector_labels

_GRPC = {
    "name": "grpc",
    "port": constants.GRPC_PORT,
    "targetPort": "grpc",
    "protocol": "TCP",
    "appProtocol": "kubernetes.io/h2c",
}
_ADMIN = {
    "name": "admin",
    "port": constants.ADMIN_PORT,
    "targetPort": "admin",
    "protocol": "TCP",
    "appProtocol": "http",
}


def render_client_service(resource: Resource) -> Manifest:
    """Of calls, from clients that know one address only."""
    return _service(resource, serving_name(resource.name), {"type": "ClusterIP", "ports": [_GRPC]})


def render_headless_service(resource: Resource) -> Manifest:
    """Of clients that balance calls over all ready pods, and of scrapes."""
    return _service(
        resource, headless_service_name(resource.name), {"clusterIP": "None", "ports": [_GRPC, _ADMIN]}
    )


def _service(resource: Resource, name: str, spec: dict[str, Any]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_metadata(resource, name),
        "spec": {**spec, "selector": selector_labels(resource.name)},
    }
