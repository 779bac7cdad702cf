"""What has to be written to get from what is there to what is wanted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from draftline_operator.constants import APPLIED_HASH_ANNOTATION
from draftline_operator.errors import NameConflictError
from draftline_operator.models.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    JOB,
    NETWORK_POLICY,
    SCALED_OBJECT,
    SERVICE_MONITOR,
    Kind,
    kind_of,
)
from draftline_operator.models.names import short_hash
from draftline_operator.models.observed import (
    ChildKey,
    Object,
    Observed,
    is_controlled_by,
    is_left_behind,
    is_terminating,
)
from draftline_operator.models.resource import Manifest
from draftline_operator.planning.drift import has_drifted
from draftline_operator.planning.gate import Gate
from draftline_operator.planning.rollout import read_rollout

# Never written again once they exist: the API server would refuse, and their names say what is in them.
_WRITTEN_ONCE: Final = (CONFIG_MAP, JOB)
# Deleted where they are ours and not wanted any more.
_OPTIONAL: Final = (
    HORIZONTAL_POD_AUTOSCALER,
    SCALED_OBJECT,
    SERVICE_MONITOR,
    NETWORK_POLICY,
)


@dataclass(frozen=True, slots=True)
class Deletion:
    """Of this very object, not of a later one with the same name."""

    kind: Kind
    name: str
    uid: str


def with_applied_hash(manifest: Manifest) -> Manifest:
    """The manifest as it is applied: it says what it was made of, replicas aside, for these come and go."""
    document = deepcopy(manifest)
    described = deepcopy(manifest)
    if kind_of(manifest) == DEPLOYMENT:
        described["spec"].pop("replicas", None)
    annotations = {
        **document["metadata"].get("annotations", {}),
        APPLIED_HASH_ANNOTATION: short_hash(described),
    }
    document["metadata"]["annotations"] = annotations
    return document


def keys_of(manifests: Iterable[Manifest]) -> set[ChildKey]:
    return {(kind_of(manifest), manifest["metadata"]["name"]) for manifest in manifests}


def check_names(keys: Iterable[ChildKey], observed: Observed) -> bool:
    """Whether all names are free or ours; False while leftovers of a namesake are about to go.

    Raises `NameConflictError` for what belongs to somebody else.
    """
    is_free = True
    for kind, name in sorted(keys, key=lambda key: (key[0].kind, key[1])):
        live = _find(observed, kind, name)
        if live is None or (is_controlled_by(live, observed.uid) and not is_terminating(live)):
            continue
        if not is_terminating(live) and not is_left_behind(live, name=observed.name, uid=observed.uid):
            raise NameConflictError(kind.kind, name)
        is_free = False
    return is_free


def changes_of(desired: Iterable[Manifest], observed: Observed) -> list[Manifest]:
    """The manifests that have to be applied, in the given order."""
    return [
        manifest for manifest in map(with_applied_hash, desired) if _has_to_be_applied(manifest, observed)
    ]


def _has_to_be_applied(manifest: Manifest, observed: Observed) -> bool:
    kind, metadata = kind_of(manifest), manifest["metadata"]
    live = _find(observed, kind, metadata["name"])
    if live is None:
        return True
    if kind in _WRITTEN_ONCE:
        return False
    if _applied_hash(live) != _applied_hash(manifest):
        return True
    return has_drifted(_without_replicas(manifest), live)


def keep_selector(manifest: Manifest, live: Object | None) -> Manifest:
    """A Deployment's selector never changes: one of an older operator is kept, and its labels on the pods."""
    if live is None:
        return manifest
    selector = live["spec"]["selector"]
    kept = deepcopy(manifest)
    kept["spec"]["selector"] = selector
    labels = {**kept["spec"]["template"]["metadata"]["labels"], **(selector.get("matchLabels") or {})}
    kept["spec"]["template"]["metadata"]["labels"] = labels
    return kept


def superfluous(desired: Sequence[Manifest], observed: Observed, gate: Gate) -> list[Deletion]:
    """What is ours and serves nothing any more."""
    wanted = keys_of(desired)
    unwanted = [
        _deletion(kind, live)
        for (kind, name), live in observed.named.items()
        if kind in _OPTIONAL and (kind, name) not in wanted and is_controlled_by(live, observed.uid)
        if not is_terminating(live)
    ]
    return [*unwanted, *_old_jobs(desired, observed, gate), *_old_config_maps(wanted, observed, gate)]


def _old_jobs(desired: Sequence[Manifest], observed: Observed, gate: Gate) -> Iterable[Deletion]:
    """Of other pairs; of this one once its verdict is kept, when it is to be repeated, or when it waits for
    what the spec does not ask for any more, such as a node."""
    hashes = {
        m["metadata"]["name"]: _applied_hash(with_applied_hash(m)) for m in desired if kind_of(m) == JOB
    }
    for job in observed.jobs:
        if not is_controlled_by(job, observed.uid) or is_terminating(job):
            continue
        is_current = gate.job is not None and job["metadata"]["uid"] == gate.job["metadata"]["uid"]
        is_outdated = hashes.get(job["metadata"]["name"], _applied_hash(job)) != _applied_hash(job)
        if not is_current or gate.is_recorded or gate.is_repeat_due or (is_outdated and not gate.has_begun):
            yield _deletion(JOB, job)


def _applied_hash(found: Mapping[str, Any]) -> str | None:
    annotations: Mapping[str, str] = found["metadata"].get("annotations") or {}
    return annotations.get(APPLIED_HASH_ANNOTATION)


def _old_config_maps(wanted: set[ChildKey], observed: Observed, gate: Gate) -> Iterable[Deletion]:
    """Only in quiet times, when pods of older revisions are gone and none of them can come back."""
    deployment = observed.deployment
    if not gate.is_open or deployment is None or not read_rollout(deployment).is_complete:
        return
    used = {name for pod in observed.pods for name in _config_maps_of(pod["spec"])}
    used |= set(_config_maps_of(deployment["spec"]["template"]["spec"]))
    for config_map in observed.config_maps:
        name = config_map["metadata"]["name"]
        is_kept = name in used or (CONFIG_MAP, name) in wanted
        if not is_kept and is_controlled_by(config_map, observed.uid) and not is_terminating(config_map):
            yield _deletion(CONFIG_MAP, config_map)


def _config_maps_of(pod_spec: Mapping[str, Any]) -> Iterable[str]:
    for volume in pod_spec.get("volumes") or ():
        if "configMap" in volume:
            yield volume["configMap"]["name"]


def _find(observed: Observed, kind: Kind, name: str) -> Object | None:
    listed = {CONFIG_MAP: observed.config_maps, JOB: observed.jobs}.get(kind, ())
    found = (item for item in listed if item["metadata"]["name"] == name)
    return next(found, None) or observed.named.get((kind, name))


def _deletion(kind: Kind, live: Object) -> Deletion:
    return Deletion(kind, live["metadata"]["name"], live["metadata"]["uid"])


def _without_replicas(manifest: Manifest) -> Manifest:
    if kind_of(manifest) != DEPLOYMENT:
        return manifest
    return {**manifest, "spec": {key: value for key, value in manifest["spec"].items() if key != "replicas"}}
