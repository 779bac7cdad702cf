"""Names that tie children to their resource: labels, selectors and the owner reference."""

from __future__ import annotations

from typing import Any

from draftline_operator import constants
from draftline_operator.models.resource import Manifest, Resource


def selector_labels(name: str, *, component: str = constants.SERVING) -> dict[str, str]:
    """The identity of a resource's pods. Selectors can never change, so nothing else goes into them."""
    return {
        constants.NAME_LABEL: constants.APP_NAME,
        constants.INSTANCE_LABEL: name,
        constants.COMPONENT_LABEL: component,
    }


def common_labels(resource: Resource, *, component: str = constants.SERVING) -> dict[str, str]:
    """Of every child. The component keeps preflight pods out of what selects serving pods."""
    return {
        **selector_labels(resource.name, component=component),
        constants.MANAGED_BY_LABEL: constants.FIELD_MANAGER,
        constants.PART_OF_LABEL: constants.APP_NAME,
    }


def owner_reference(resource: Resource, *, is_controller: bool = True) -> dict[str, Any]:
    """With it the garbage collector deletes the child after its owner; no finalizer is needed."""
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "name": resource.name,
        "uid": resource.uid,
        "controller": is_controller,
        "blockOwnerDeletion": is_controller,
    }


def object_metadata(resource: Resource, name: str, *, component: str = constants.SERVING) -> Manifest:
    """Of a child that only this resource owns."""
    return {
        "name": name,
        "namespace": resource.namespace,
        "labels": common_labels(resource, component=component),
        "ownerReferences": [owner_reference(resource)],
    }
