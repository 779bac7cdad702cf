"""Two clusters in front of another one: one that asks and remembers, one that answers from memory."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any

from draftline_operator.cluster.forwarding import ForwardingCluster
from draftline_operator.cluster.interface import Cluster, Subresource
from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.errors import NotFromMemoryError
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT, Kind, kind_of
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest


class RememberingCluster(ForwardingCluster):
    """Asks each time, and remembers the answers and what it writes."""

    def __init__(self, cluster: Cluster, memory: ObjectMemory) -> None:
        super().__init__(cluster)
        self._memory = memory

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        since = self._memory.now()
        return self._learn(kind, namespace, name, await super().get(kind, namespace, name), since)

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        since = self._memory.now()
        found = await super().list(kind, namespace, labels=labels, is_cached=is_cached)
        if not is_cached:
            self._memory.learn_list(kind, namespace, labels, found, since=since)
        return found

    async def create(self, manifest: Manifest) -> Object:
        created = await super().create(manifest)
        self._memory.learn(kind_of(manifest), created)
        return created

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        applied = await super().apply(manifest, field_manager=field_manager)
        self._memory.learn(kind_of(manifest), applied)
        return applied

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: Subresource | None = None,
    ) -> Object | None:
        since = self._memory.now()
        patched = await super().patch(kind, namespace, name, change, subresource=subresource)
        if subresource == "scale":  # the answer is no such object
            return patched
        return self._learn(kind, namespace, name, patched, since)

    def _learn(
        self, kind: Kind, namespace: str | None, name: str, found: Object | None, since: int
    ) -> Object | None:
        if found is None:
            self._memory.learn_missing(kind, namespace, name, since=since)
        else:
            self._memory.learn(kind, found)
        return found


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
