"""What the rest of the operator needs of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from draftline_operator.models.kinds import Kind
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest

Subresource = Literal["status", "scale"]


class Cluster(Protocol):
    """All methods raise `ForbiddenError`, `RejectedError`, `ConflictError` or `ClusterError`."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """None where it, or its whole kind, does not exist."""

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows the kind."""

    async def minor_version(self) -> int:
        """Of Kubernetes, such as 37."""

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> list[Object]:
        """Of one namespace or, for None, of all; `is_cached` may be a moment old, and is cheap."""

    async def create(self, manifest: Manifest) -> Object:
        """`ConflictError` where it exists."""

    async def replace(self, manifest: Manifest) -> Object:
        """As a whole; `ConflictError` where metadata.resourceVersion is not current, or it is gone."""

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        """Server-side apply, with force: the fields of the manifest become ours, and no others."""

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: Subresource | None = None,
    ) -> Object | None:
        """JSON merge patch; with metadata.resourceVersion in it `ConflictError` where that is not current.

        None where the object does not exist.
        """

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> None:
        """In the background; what is gone already is fine, `ConflictError` where it is another one by now."""
