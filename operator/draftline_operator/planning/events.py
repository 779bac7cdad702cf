"""Which events are news. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftline_operator.constants import KIND
from draftline_operator.models.kinds import CONFIG_MAP, HORIZONTAL_POD_AUTOSCALER
from draftline_operator.models.names import short_hash

_METADATA = ("uid", "generation", "labels", "annotations", "ownerReferences", "deletionTimestamp")


def fingerprint(body: Mapping[str, Any]) -> str:
    """Equal for two states of an object that call for the same.

    Of a resource its status is our own; of an autoscaler the measured values change all the time; the record
    of a pair gets one owner after another.
    """
    metadata = body.get("metadata") or {}
    if body.get("kind") == CONFIG_MAP.kind:
        return short_hash([metadata.get("deletionTimestamp"), body.get("data")])
    seen: dict[str, Any] = {key: metadata[key] for key in _METADATA if key in metadata}
    if body.get("kind") == HORIZONTAL_POD_AUTOSCALER.kind:
        conditions = (body.get("status") or {}).get("conditions") or ()
        seen["conditions"] = [[c.get("type"), c.get("status"), c.get("reason")] for c in conditions]
        seen["spec"] = body.get("spec")
    elif body.get("kind") != KIND:
        seen.update({key: value for key, value in body.items() if key != "metadata"})
    return short_hash(seen)
