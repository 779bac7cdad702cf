"""For tests: a cluster in front of a real one that counts writes and can break down at any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftline_operator.cluster.interface import Cluster, Subresource
from draftline_operator.models.kinds import Kind, kind_of
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest


class Killed(BaseException):
    """What a killed process would look like to its own code, if it could."""


class RecordingCluster:
    """Passes everything on. `writes` has verb, kind and name; `kill_after` ends the process after so many."""

    def __init__(self, cluster: Cluster, *, kill_after: int | None = None) -> None:
        self._cluster = cluster
        self.kill_after = kill_after
        self.writes: list[tuple[str, str, str]] = []

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
        created = await self._cluster.create(manifest)
        self._wrote("create", kind_of(manifest), manifest["metadata"].get("name", ""))
        return created

    async def replace(self, manifest: Manifest) -> Object:
        replaced = await self._cluster.replace(manifest)
        self._wrote("replace", kind_of(manifest), manifest["metadata"]["name"])
        return replaced

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        applied = await self._cluster.apply(manifest, field_manager=field_manager)
        self._wrote("apply", kind_of(manifest), manifest["metadata"]["name"])
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
        patched = await self._cluster.patch(kind, namespace, name, change, subresource=subresource)
        self._wrote(f"patch/{subresource}" if subresource else "patch", kind, name)
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
        await self._cluster.delete(kind, namespace, name, uid=uid, resource_version=resource_version)
        self._wrote("delete", kind, name)

    def _wrote(self, verb: str, kind: Kind, name: str) -> None:
        self.writes.append((verb, kind.kind, name))
        if self.kill_after is not None and len(self.writes) >= self.kill_after:
            raise Killed
