"""How many pods there shall be: the resource's own `replicas`, which people and the autoscaler write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftline_operator.models.spec import SpeculativeDeploymentSpec


def wanted_replicas(spec: SpeculativeDeploymentSpec, live: int | None) -> int:
    """`live` is what the Deployment has; None where there is none.

    A spec without `replicas` changes nothing, also where it replaced one that had them. With autoscaling no
    pods are left out or added that the autoscaler would bring back or take away at once.
    """
    asked: int | None = spec.replicas
    autoscaling = spec.autoscaling
    if autoscaling is None:
        return asked if asked is not None else live or 1
    if asked is None:
        asked = live or autoscaling.min_replicas
    return _within(asked, autoscaling.min_replicas, autoscaling.max_replicas)


def replicas_of_invalid(spec: Mapping[str, Any], live: int | None) -> int | None:
    """The same for a spec of which some other field is wrong; None where it says nothing of use."""
    asked, autoscaling = spec.get("replicas"), spec.get("autoscaling")
    if not isinstance(asked, int):
        return live
    if autoscaling is None:
        return asked
    if not isinstance(autoscaling, Mapping):
        return live
    low, high = autoscaling.get("minReplicas", 1), autoscaling.get("maxReplicas", asked)
    if not isinstance(low, int) or not isinstance(high, int):
        return live
    return _within(asked, low, high)


def _within(asked: int, low: int, high: int) -> int:
    """Within an autoscaler's bounds; it leaves 0 alone."""
    return 0 if asked == 0 else min(max(asked, low), high)


def replicas_to_fill_in(spec: SpeculativeDeploymentSpec, wanted: int) -> int | None:
    """What to write into a resource without `replicas`: nobody can read its /scale before."""
    asked: int | None = spec.replicas
    return wanted if asked is None else None
