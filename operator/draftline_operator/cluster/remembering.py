"""Two clusters in front of another one: one that asks and remembers, one that answers from memory."""

from __future__ import annotations

import builtins

from draftline_operator.cluster.forwarding import ForwardingCluster
from draftline_operator.cluster.interface import Cluster
from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.errors import NotFromMemoryError
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT, Kind
from draftline_operator.models.observed import Object


class RememberingCluster(ForwardingCluster):
    """Asks each time, and remembers the answers and what it writes."""

    def __init__(self, cluster: Cluster, memory: ObjectMemory) -> None:
        super().__init__(cluster)
        self._memory = memory

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        since = self._memory.now()
        found = await super().get(kind, namespace, name)
        if found is not None:
            self._memory.learn(kind, found)
        else:
            self._memory.learn_missing(kind, namespace, name, since=since)
        return found

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        since = self._memory.now()
        found = await super().list(kind, namespace, labels=labels, is_cached=is_cached)
        if not is_cached:
            self._memory.learn_list(kind, namespace, labels, found, since=since)
        return found

    def _after(self, verb: str, kind: Kind, namespace: str | None, name: str, written: Object | None) -> None:
        # What is deleted may stay for a while, and of a scale the answer is no such object.
        if verb in ("delete", "patch/scale"):
            return
        if written is not None:
            self._memory.learn(kind, written)
        else:  # a deletion that no watch has told: there may be more
            self._memory.forget(namespace)


class RememberedCluster(ForwardingCluster):
    """Asks only for what is not remembered, and refuses to write anything but the status of a resource.

    For a look that finds nothing to be done: `NotFromMemoryError` says that there is something, which is then
    to be decided on what the API server says. A status may come from memory: it is written against the
    version that was read, and events that are on their way will correct it.
    """

    def __init__(self, cluster: RememberingCluster, memory: ObjectMemory) -> None:
        super().__init__(cluster)
        self._memory = memory

    def _before(self, verb: str, kind: Kind) -> None:
        if (verb, kind) != ("patch/status", SPECULATIVE_DEPLOYMENT):
            raise NotFromMemoryError

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        known = self._memory.get(kind, namespace, name)
        return known if known is not None else await super().get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        known = self._memory.list(kind, namespace, labels)
        if known is not None:
            return known
        return await super().list(kind, namespace, labels=labels, is_cached=is_cached)
