"""The ConfigMap that keeps a preflight result under its pair's key, for all resources that serve the pair."""

from __future__ import annotations

from typing import Any

from draftline_operator import constants
from draftline_operator.models.names import pair_record_name
from draftline_operator.models.resource import Manifest, Resource
from draftline_operator.resources.labels import owner_reference

RESULT_KEY = "result.json"


def render_pair_record(resource: Resource, pair_key: str, result_json: str) -> Manifest:
    """With its first owner; it goes away with its last one."""
    labels = {
        constants.NAME_LABEL: constants.APP_NAME,
        constants.COMPONENT_LABEL: constants.PREFLIGHT,
        constants.MANAGED_BY_LABEL: constants.FIELD_MANAGER,
        constants.PART_OF_LABEL: constants.APP_NAME,
        constants.REVISION_LABEL: pair_key,
    }
    return {**_owned(resource, pair_key, labels=labels), "data": {RESULT_KEY: result_json}}


def render_pair_owner(resource: Resource, pair_key: str, *, uid: str) -> Manifest:
    """One more owner, to be applied by a field manager that owns nothing else.

    `uid` is the record's: one that is gone is not made anew without its verdict.
    """
    return _owned(resource, pair_key, uid=uid)


def _owned(resource: Resource, pair_key: str, **metadata: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": pair_record_name(pair_key),
            "namespace": resource.namespace,
            **metadata,
            "ownerReferences": [owner_reference(resource, is_controller=False)],
        },
    }
