"""Brings a Deployment to its number of pods, such that the idlest ones leave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Protocol

from draftline_operator.cluster.interface import Cluster
from draftline_operator.constants import POD_DELETION_COST_ANNOTATION
from draftline_operator.models.kinds import DEPLOYMENT, POD
from draftline_operator.models.observed import Object
from draftline_operator.planning.deletion_cost import costs_to_write

# The ReplicaSet controller sees annotations through a cache; it has to see them before it picks pods.
COST_SETTLES_SECONDS: Final = 1.0


class Loads(Protocol):
    """What is known of the load of pods."""

    async def refresh(self, namespace: str, pods: Iterable[Object]) -> Mapping[str, int | None]:
        """Requests in flight by pod, asked for now; None where a pod does not tell."""


async def scale(
    cluster: Cluster,
    deployment: Object,
    replicas: int,
    *,
    pods: list[Object],
    loads: Loads,
    is_still_wanted: Callable[[], Awaitable[bool]],
    sleep: Callable[[float], Awaitable[None]],
) -> Object | None:
    """Returns the Deployment as it is then; None where it is gone, or fewer pods are no longer wanted.

    Before fewer pods are asked for, all of them get their cost. That takes seconds in which an autoscaler may
    ask for more again: so the last look at what is wanted comes after it.
    """
    namespace, name = deployment["metadata"]["namespace"], deployment["metadata"]["name"]
    surplus = deployment["spec"].get("replicas", 1) - replicas
    if surplus > 0:
        costs = costs_to_write(pods, await loads.refresh(namespace, pods), surplus)
        for pod, cost in costs.items():
            change = {"metadata": {"annotations": {POD_DELETION_COST_ANNOTATION: str(cost)}}}
            await cluster.patch(POD, namespace, pod, change)
        if costs:
            await sleep(COST_SETTLES_SECONDS)
        if not await is_still_wanted():
            return None
    return await cluster.patch(DEPLOYMENT, namespace, name, {"spec": {"replicas": replicas}})
