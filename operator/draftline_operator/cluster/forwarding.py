"""A cluster in front of another one: passes everything on, and is told before and after each write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftline_operator.cluster.interface import Cluster, Subresource
from draftline_operator.models.kinds import Kind, kind_of
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest


class ForwardingCluster:
    """A `Cluster`. What it is there for overrides `_before` or `_after`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _before(self, verb: str, kind: Kind) -> None:
        """Called before a write; what it raises prevents it."""

    def _after(self, verb: str, kind: Kind, namespace: str | None, name: str, written: Object | None) -> None:
        """Called after a write that succeeded; `written` is None where nothing is there any more."""

    def _after_manifest(self, verb: str, manifest: Manifest, written: Object) -> Object:
        metadata = manifest["metadata"]
        self._after(verb, kind_of(manifest), metadata.get("namespace"), metadata.get("name", ""), written)
        return written

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
        self._before("create", kind_of(manifest))
        return self._after_manifest("create", manifest, await self._cluster.create(manifest))

    async def replace(self, manifest: Manifest) -> Object:
        self._before("replace", kind_of(manifest))
        return self._after_manifest("replace", manifest, await self._cluster.replace(manifest))

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        self._before("apply", kind_of(manifest))
        applied = await self._cluster.apply(manifest, field_manager=field_manager)
        return self._after_manifest("apply", manifest, applied)

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: Subresource | None = None,
    ) -> Object | None:
        verb = f"patch/{subresource}" if subresource else "patch"
        self._before(verb, kind)
        patched = await self._cluster.patch(kind, namespace, name, change, subresource=subresource)
        self._after(verb, kind, namespace, name, patched)
        return patched

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> None:
        self._before("delete", kind)
        await self._cluster.delete(kind, namespace, name, uid=uid, resource_version=resource_version)
        self._after("delete", kind, namespace, name, None)
