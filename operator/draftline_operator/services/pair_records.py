"""What is kept of a pair's preflight, for all resources of a namespace that serve it."""

from __future__ import annotations

import json

from draftline_operator.cluster.interface import Cluster
from draftline_operator.constants import FIELD_MANAGER, MANAGED_BY_LABEL
from draftline_operator.errors import NameConflictError
from draftline_operator.models.kinds import CONFIG_MAP
from draftline_operator.models.names import pair_record_name
from draftline_operator.models.observed import Object
from draftline_operator.models.preflight import PreflightResult, parse_result
from draftline_operator.models.resource import Resource
from draftline_operator.planning.gate import Gate
from draftline_operator.resources.pair_record import RESULT_KEY, render_pair_owner, render_pair_record


async def find_record(cluster: Cluster, namespace: str, pair_key: str) -> Object | None:
    """Raises `NameConflictError` where its name is somebody else's."""
    name = pair_record_name(pair_key)
    found = await cluster.get(CONFIG_MAP, namespace, name)
    if found is not None and (found["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) != FIELD_MANAGER:
        raise NameConflictError(CONFIG_MAP.kind, name)
    return found


def read_record(record: Object | None) -> PreflightResult | None:
    """None also for one that somebody has spoiled: the pair is checked again, and the record written anew."""
    try:
        return parse_result(record["data"][RESULT_KEY]) if record is not None else None
    except (KeyError, TypeError, ValueError):
        return None


async def keep_record(cluster: Cluster, resource: Resource, gate: Gate, record: Object | None) -> bool:
    """Writes an open gate's verdict where it is missing, or lacks this resource as an owner.

    The first owner creates it. Each further one is added by a field manager of its own that owns nothing
    else: none takes another's place away, and the manager goes with the owner that the garbage collector
    takes out.
    """
    if not gate.is_open or gate.result is None:
        return False
    if record is None:
        await cluster.create(render_pair_record(resource, gate.pair_key, _text(gate.result)))
        return True
    if not gate.is_recorded:  # somebody has spoiled it
        change = {"data": {RESULT_KEY: _text(gate.result)}}
        await cluster.patch(CONFIG_MAP, resource.namespace, record["metadata"]["name"], change)
        return True
    owners = record["metadata"].get("ownerReferences") or ()
    if any(owner.get("uid") == resource.uid for owner in owners):
        return False
    manifest = render_pair_owner(resource, gate.pair_key, uid=record["metadata"]["uid"])
    await cluster.apply(manifest, field_manager=f"{FIELD_MANAGER}-{resource.uid}")
    return True


def _text(result: PreflightResult) -> str:
    return json.dumps(result.model_dump(by_alias=True, exclude_none=True), sort_keys=True)


class PairClaims:
    """Of resources that are reconciled at the same moment only one starts the Job of a pair."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], str] = {}

    def take(self, namespace: str, pair_key: str, name: str) -> bool:
        return self._holders.setdefault((namespace, pair_key), name) == name

    def release(self, namespace: str, name: str) -> None:
        for key in [key for key, holder in self._holders.items() if (key[0], holder) == (namespace, name)]:
            del self._holders[key]
