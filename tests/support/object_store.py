"""Objects in memory behind the operator's `Cluster`, for tests of what is decided from them.

Not an API server: no validation, no defaults, no controllers. What depends on those is tested on a real one.
"""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from draftline_operator.cluster.interface import Subresource
from draftline_operator.errors import ClusterError, ConflictError
from draftline_operator.models.kinds import SUBJECT_ACCESS_REVIEW, Kind, kind_of
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest

Key = tuple[str, str | None, str]


class ObjectStore:
    """`allows` is the verdict of access reviews; `before_patch` may do what somebody else does in between."""

    def __init__(self, objects: Iterable[Manifest] = ()) -> None:
        self.objects: dict[Key, Object] = {}
        self.reviews: list[Manifest] = []
        self.allows: Callable[[Mapping[str, Any]], bool] = lambda _: True
        self.before_patch: Callable[[], None] = lambda: None
        self.is_reachable = True
        self._version = 0
        for manifest in objects:
            self.put(manifest)

    def put(self, manifest: Manifest) -> Object:
        self._version += 1
        stored = copy.deepcopy(manifest)
        stored["metadata"]["resourceVersion"] = str(self._version)
        metadata = stored["metadata"]
        self.objects[kind_of(stored).kind, metadata.get("namespace"), metadata["name"]] = stored
        return copy.deepcopy(stored)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        self._reach()
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    async def serves(self, kind: Kind) -> bool:
        return True

    async def minor_version(self) -> int:
        return 37

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        self._reach()
        wanted = dict(part.split("=", 1) for part in labels.split(",")) if labels else {}
        return [
            copy.deepcopy(found)
            for (found_kind, found_namespace, _), found in self.objects.items()
            if found_kind == kind.kind
            and namespace in (None, found_namespace)
            and wanted.items() <= found["metadata"].get("labels", {}).items()
        ]

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        raise NotImplementedError("server-side apply needs a real API server")

    async def replace(self, manifest: Manifest) -> Object:
        self._reach()
        metadata = manifest["metadata"]
        found = self.objects.get((manifest["kind"], metadata.get("namespace"), metadata["name"]))
        if found is None:
            raise ConflictError("the object is gone")
        self._expect(found, metadata.get("resourceVersion"))
        return self.put(manifest)

    async def create(self, manifest: Manifest) -> Object:
        self._reach()
        if kind_of(manifest) == SUBJECT_ACCESS_REVIEW:
            self.reviews.append(manifest)
            return {**manifest, "status": {"allowed": self.allows(manifest["spec"])}}
        return self.put(manifest)

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: Subresource | None = None,
    ) -> Object | None:
        self._reach()
        self.before_patch()
        found = self.objects.get((kind.kind, namespace, name))
        if found is None:
            return None
        self._expect(found, change.get("metadata", {}).get("resourceVersion"))
        return self.put(_merged(found, change))

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> None:
        self._reach()
        if (found := self.objects.get((kind.kind, namespace, name))) is not None:
            self._expect(found, resource_version)
            del self.objects[kind.kind, namespace, name]

    def _reach(self) -> None:
        if not self.is_reachable:
            raise ClusterError("the API server is away")

    def _expect(self, found: Object, version: str | None) -> None:
        if version is not None and version != found["metadata"]["resourceVersion"]:
            raise ConflictError("the object has been modified")


def _merged(old: Any, change: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(change, Mapping):
        return change
    merged = {key: value for key, value in old.items() if change.get(key, ...) is not None}
    return merged | {key: _merged(old.get(key), value) for key, value in change.items() if value is not None}
