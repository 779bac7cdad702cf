"""Which pods a scale-in takes: the idlest. The ReplicaSet controller asks pod-deletion-cost for it.

Written only just before a scale-in, and only three values relative to that decision: the annotation is not
made for following a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from draftline_operator.constants import POD_DELETION_COST_ANNOTATION
from draftline_operator.models.observed import Object, is_alive

IDLE: Final = 0
"""Also what a pod without the annotation has."""
LEAVING: Final = 1
STAYING: Final = 2


def deletion_costs(in_flight: Mapping[str, int | None], leaving: int) -> dict[str, int]:
    """By pod, for a scale-in by `leaving` pods. A pod whose load is unknown counts as the busiest."""
    order = sorted(in_flight, key=lambda name: (_load(in_flight[name]), name))
    return {
        name: IDLE if in_flight[name] == 0 else LEAVING if place < leaving else STAYING
        for place, name in enumerate(order)
    }


def costs_to_write(
    pods: Iterable[Object], in_flight: Mapping[str, int | None], surplus: int
) -> dict[str, int]:
    """What has to change of the annotations before `surplus` pods leave.

    Pods that are not ready go first anyway.
    """
    staying = [pod for pod in pods if is_alive(pod)]
    ready = [pod for pod in staying if is_ready(pod)]
    leaving = max(0, surplus - (len(staying) - len(ready)))
    costs = deletion_costs({_name(pod): in_flight.get(_name(pod)) for pod in ready}, leaving)
    return (
        {_name(pod): costs[_name(pod)] for pod in ready if _cost(pod) != costs[_name(pod)]} if leaving else {}
    )


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _load(in_flight: int | None) -> float:
    return float("inf") if in_flight is None else in_flight


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _cost(pod: Object) -> int:
    annotations = pod["metadata"].get("annotations") or {}
    try:
        return int(annotations.get(POD_DELETION_COST_ANNOTATION, IDLE))
    except ValueError:
        return -1  # refused by newer API servers; anything that is none of ours
