"""What the operator has made in a namespace: everything that it decides, and nothing that the moment puts in.

Equal for two namespaces whose resources have the same names and specs, however they got there.
"""

from __future__ import annotations

import copy
from typing import Any

from draftline_operator.constants import APPLIED_HASH_ANNOTATION
from draftline_operator.models.kinds import CONFIG_MAP, SPECULATIVE_DEPLOYMENT
from draftline_operator.models.names import pair_record_name
from draftline_operator.models.observed import Object
from support.operator_world import CHILD_KINDS, World

_OF_EVERY_NAMESPACE = ("ConfigMap kube-root-ca.crt", "ServiceAccount default")
# The hash covers the owner's uid, the revision counts what came before.
_OF_THE_MOMENT = (APPLIED_HASH_ANNOTATION, "deployment.kubernetes.io/revision")

Made = dict[str, Any]
"""By kind and name."""


async def made_objects(world: World) -> Made:
    """Children and whatever else has the operator's kinds, and what resources say of themselves."""
    found = {
        f"{kind} {item['metadata']['name']}": _decided(item)
        for kind in CHILD_KINDS
        for item in await world.client.list(kind, world.namespace)
    }
    for name in _OF_EVERY_NAMESPACE:
        found.pop(name, None)
    for body in await world.client.list(SPECULATIVE_DEPLOYMENT, world.namespace):
        found[f"{SPECULATIVE_DEPLOYMENT} {body['metadata']['name']}"] = _told(body)
    return found


def split_records(made: Made) -> tuple[Made, Made]:
    """Verdicts on pairs, which stay as long as a resource that asked for them, and all the rest."""
    prefix = f"{CONFIG_MAP} {pair_record_name('')}"
    records = {key: value for key, value in made.items() if key.startswith(prefix)}
    return records, {key: value for key, value in made.items() if key not in records}


async def is_empty(world: World) -> bool:
    return not await made_objects(world) and not await world.pods()


def _decided(item: Object) -> Any:
    metadata = item["metadata"]
    annotations = metadata.get("annotations") or {}
    body = copy.deepcopy({k: v for k, v in item.items() if k not in ("metadata", "status")})
    for address in ("clusterIP", "clusterIPs"):
        body.get("spec", {}).pop(address, None)
    return {
        **body,
        "labels": metadata.get("labels"),
        "annotations": {key: value for key, value in annotations.items() if key not in _OF_THE_MOMENT},
        "finalizers": metadata.get("finalizers"),
        "owners": [
            {key: value for key, value in owner.items() if key != "uid"}
            for owner in metadata.get("ownerReferences") or ()
        ],
    }


def _told(body: Object) -> Any:
    """Of the autoscaler's condition nothing: when it reports is its own business."""
    status = body.get("status") or {}
    conditions = {
        condition["type"]: (condition["status"], condition["reason"])
        for condition in status.get("conditions", ())
        if condition["type"] != "AutoscalingActive"
    }
    figures = {key: status.get(key) for key in ("replicas", "readyReplicas", "pairDigest", "currentRevision")}
    return {"spec": body["spec"], "conditions": conditions, **figures}
