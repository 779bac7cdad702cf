"""The status as it is to be, and the smallest change that gets it there. Pure.

Live figures are not here: they change all the time and are written apart from this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from draftline_operator.constants import REVISION_LABEL
from draftline_operator.models.observed import Object, Observed
from draftline_operator.models.preflight import PreflightModel
from draftline_operator.models.status import Condition, ConditionType, merge_conditions
from draftline_operator.planning.gate import Gate
from draftline_operator.planning.rollout import Rollout

_OF_THE_PAIR: Final = ("pairDigest", "target", "draft", "memoryPlan")
LIVE_FIGURES: Final = ("acceptanceRate", "queueDepth", "speculationState")
_TOLD_UNSEEN: Final = (ConditionType.READY, ConditionType.PROGRESSING, ConditionType.DEGRADED)


def status_document(
    *,
    observed: Observed,
    generation: int,
    conditions: Sequence[Condition],
    gate: Gate | None,
    rollout: Rollout | None,
    selector: str,
    now: str,
) -> dict[str, Any]:
    """Of the pair it tells what was found out last, also while a new one is being checked."""
    known = {key: observed.status[key] for key in _OF_THE_PAIR if key in observed.status}
    return {
        **known,
        **_findings(gate),
        "observedGeneration": generation,
        "conditions": merge_conditions(
            observed.status.get("conditions") or (), conditions, generation=generation, now=now
        ),
        "replicas": rollout.lasting if rollout is not None else 0,
        "readyReplicas": rollout.ready if rollout is not None else 0,
        "selector": selector,
        **_revision(observed.deployment),
    }


def keep_what_was_seen(document: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Of a look that was refused: it tells what stands in the way, and of all else what was told last.

    Pods serve on, whoever may not see them; an autoscaler must not read that there are none.
    """
    before = {condition.get("type"): condition for condition in old.get("conditions") or ()}
    conditions = [
        condition if condition["type"] in _TOLD_UNSEEN else before.get(condition["type"], condition)
        for condition in document["conditions"]
    ]
    return {**document, **old, "observedGeneration": document["observedGeneration"], "conditions": conditions}


def failure_change(status: Mapping[str, Any], message: str, *, generation: int, now: str) -> dict[str, Any]:
    """Tells that a write keeps failing, and leaves all else as it was told: nobody knows how far it got."""
    conditions = list(status.get("conditions") or ())
    degraded = Condition(ConditionType.DEGRADED, "True", "ClusterError", message)
    (told,) = merge_conditions(conditions, [degraded], generation=generation, now=now)
    others = [condition for condition in conditions if condition.get("type") != ConditionType.DEGRADED]
    return merge_patch(status, {**status, "conditions": [*others, told]})


def status_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch of the status; live figures stay as they are."""
    kept = {key: old[key] for key in LIVE_FIGURES if key in old}
    return merge_patch(old, {**kept, **new})


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch from one to the other; empty where they are equal."""
    change: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := merge_patch(before, value):
                change[key] = inner
        elif key not in old or before != value:
            change[key] = value
    return change


def _findings(gate: Gate | None) -> dict[str, Any]:
    result = gate.result if gate is not None else None
    if gate is None or result is None:
        return {}
    found: dict[str, Any] = {}
    if result.memory is not None:
        found["memoryPlan"] = result.memory.model_dump(by_alias=True, exclude_none=True)
    if gate.is_open:
        found["pairDigest"] = result.pair_digest
        found["target"] = _model(result.target)
        found["draft"] = _model(result.draft)
    return {key: value for key, value in found.items() if value is not None}


def _model(model: PreflightModel | None) -> dict[str, Any] | None:
    if model is None:
        return None
    said = {"architecture": model.architecture, "digest": model.digest, "revision": model.revision}
    return {key: value for key, value in said.items() if value is not None}


def _revision(deployment: Object | None) -> dict[str, str]:
    if deployment is None:
        return {}
    labels = deployment["spec"]["template"]["metadata"].get("labels") or {}
    return {"currentRevision": labels[REVISION_LABEL]} if REVISION_LABEL in labels else {}
