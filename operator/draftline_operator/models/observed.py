"""What is seen of the cluster before anything is decided: plain objects as the API server has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftline_operator.constants import COMPONENT_LABEL, KIND, SERVING
from draftline_operator.models.kinds import DEPLOYMENT, Kind

Object = dict[str, Any]
"""A Kubernetes object as it was read."""
ChildKey = tuple[Kind, str]
"""A child's kind and name; its namespace is the resource's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that one reconcile looks at. Missing objects are absent from the mappings."""

    uid: str
    """Of the resource; what it controls belongs to it, and nothing else does."""
    name: str
    status: Mapping[str, Any] = field(default_factory=dict)
    """The resource's own, as it was written last."""
    named: Mapping[ChildKey, Object] = field(default_factory=dict)
    """Whatever has the name of a child, ours or not."""
    config_maps: tuple[Object, ...] = ()
    """With our labels, configuration files of all revisions."""
    jobs: tuple[Object, ...] = ()
    """Preflight Jobs of the namespace for this pair, and all of this resource."""
    pods: tuple[Object, ...] = ()
    """Serving pods and those of preflight Jobs, leaving ones too; of others' Jobs while one is awaited."""
    autoscalers: tuple[Object, ...] = ()
    """All of the namespace: somebody else's may scale what is ours."""

    def own(self, kind: Kind, name: str) -> Object | None:
        """The object where it is there and ours."""
        found = self.named.get((kind, name))
        return found if found is not None and is_controlled_by(found, self.uid) else None

    @property
    def deployment(self) -> Object | None:
        return self.own(DEPLOYMENT, self.name)

    @property
    def serving_pods(self) -> list[Object]:
        """Leaving ones too."""
        return [pod for pod in self.pods if _component(pod) == SERVING]

    def with_object(self, kind: Kind, found: Object) -> Observed:
        """The same after `found` was written."""
        return replace(self, named={**self.named, (kind, found["metadata"]["name"]): found})


def _component(pod: Object) -> str | None:
    labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
    return labels.get(COMPONENT_LABEL)


def controller_of(found: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference of whoever controls the object."""
    references: Iterable[Mapping[str, Any]] = found["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), None)


def is_controlled_by(found: Mapping[str, Any], uid: str) -> bool:
    controller = controller_of(found)
    return controller is not None and controller.get("uid") == uid


def is_terminating(found: Mapping[str, Any]) -> bool:
    return found["metadata"].get("deletionTimestamp") is not None


def is_left_behind(found: Mapping[str, Any], *, name: str, uid: str) -> bool:
    """Whether it belonged to a deleted resource of the same name, and is about to be collected."""
    controller = controller_of(found)
    return (
        controller is not None
        and controller.get("kind") == KIND
        and controller.get("name") == name
        and controller.get("uid") != uid
    )


def is_alive(pod: Mapping[str, Any]) -> bool:
    """Whether the pod runs or will: neither leaving nor ended."""
    return not is_terminating(pod) and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
