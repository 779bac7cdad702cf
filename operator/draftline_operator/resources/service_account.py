"""The identity of the pods. They never talk to the API server, so it has no rights and mounts no token."""

from __future__ import annotations

from draftline_operator.models.names import serving_name
from draftline_operator.models.resource import Manifest, Resource
from draftline_operator.resources.labels import object_metadata


def render_service_account(resource: Resource) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": object_metadata(resource, serving_name(resource.name)),
        "automountServiceAccountToken": False,
    }
