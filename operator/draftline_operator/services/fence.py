"""Lets writes pass only while this process leads, and counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from draftline_operator.cluster.interface import Cluster, Subresource
from draftline_operator.errors import ClusterError
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.models.kinds import Kind, kind_of
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest


class FencedCluster:
    """A `Cluster` that refuses to write once the Lease may be somebody else's.

    It looks at the clock just before each write: a process that was asleep does not finish what it began.
    """

    def __init__(self, cluster: Cluster, is_leader: Callable[[], bool], metrics: OperatorMetrics) -> None:
        self._cluster = cluster
        self._is_leader = is_leader
        self._metrics = metrics

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return await self._cluster.get(kind, namespace, name)

    async def serves(self, kind: Kind) -> bool:
        return await self._cluster.serves(kind)

    async def minor_version(self) -> int:
        return await self._cluster.minor_version()

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> list[Object]:
        return await self._cluster.list(kind, namespace, labels=labels, is_cached=is_cached)

    async def create(self, manifest: Manifest) -> Object:
        self._pass(kind_of(manifest), "create")
        return await self._cluster.create(manifest)

    async def replace(self, manifest: Manifest) -> Object:
        self._pass(kind_of(manifest), "replace")
        return await self._cluster.replace(manifest)

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        self._pass(kind_of(manifest), "apply")
        return await self._cluster.apply(manifest, field_manager=field_manager)

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: Subresource | None = None,
    ) -> Object | None:
        self._pass(kind, f"patch/{subresource}" if subresource else "patch")
        return await self._cluster.patch(kind, namespace, name, change, subresource=subresource)

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> None:
        self._pass(kind, "delete")
        await self._cluster.delete(kind, namespace, name, uid=uid, resource_version=resource_version)

    def _pass(self, kind: Kind, verb: str) -> None:
        if not self._is_leader():
            raise ClusterError("this operator does not lead any more")
        self._metrics.writes.labels(kind.kind, verb).inc()
