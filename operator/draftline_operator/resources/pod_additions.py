"""What users add to the pods: checked against what is the operator's own, and brought into one spelling.

The API server keeps most of spec.podTemplate as it is, so its faults would else show up as a Deployment that
is refused, or as pods that behave strangely.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

from draftline_operator import constants
from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.quantity import canonical_quantity
from draftline_operator.models.resource import Manifest, RenderSettings
from draftline_operator.models.spec import SpeculativeDeploymentSpec
from draftline_operator.resources import paths

_TEMPLATE = "spec.podTemplate"
_OWN_LABELS = frozenset(
    {
        constants.NAME_LABEL,
        constants.INSTANCE_LABEL,
        constants.COMPONENT_LABEL,
        constants.MANAGED_BY_LABEL,
        constants.PART_OF_LABEL,
    }
)
_OWN_ANNOTATIONS = frozenset({constants.DEFAULT_CONTAINER_ANNOTATION, constants.POD_DELETION_COST_ANNOTATION})
_OWN_VOLUMES = frozenset(
    {
        paths.CONFIG_VOLUME,
        paths.MODEL_CACHE_VOLUME,
        paths.WORK_VOLUME,
        paths.SHARED_MEMORY_VOLUME,
        paths.TEMPORARY_VOLUME,
        "target-model",
        "draft-model",
    }
)
# Of claims that models are read from.
_OWN_VOLUME = re.compile(r"models-[0-9a-f]{8}")
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


def added_labels(spec: SpeculativeDeploymentSpec) -> dict[str, str]:
    return _without_own(spec.pod_template.labels, f"{_TEMPLATE}.labels", _OWN_LABELS)


def added_annotations(spec: SpeculativeDeploymentSpec) -> dict[str, str]:
    return _without_own(spec.pod_template.annotations, f"{_TEMPLATE}.annotations", _OWN_ANNOTATIONS)


def added_env(spec: SpeculativeDeploymentSpec, own_names: Iterable[str]) -> list[Manifest]:
    """In the user's order, which matters: a variable may refer to those before it."""
    own, seen = frozenset(own_names), set[str]()
    for index, variable in enumerate(spec.pod_template.env):
        field, name = f"{_TEMPLATE}.env[{index}].name", str(variable["name"])
        if not _ENV_NAME.fullmatch(name):
            raise InvalidSpecError(field, f"{name!r} cannot be the name of an environment variable")
        if name in own:
            raise InvalidSpecError(field, f"{name} is set by the operator")
        _refuse_second(name, seen, field)
    return [_without_nulls(variable) for variable in spec.pod_template.env]


def added_volumes(spec: SpeculativeDeploymentSpec, settings: RenderSettings) -> list[Manifest]:
    seen = set[str]()
    for index, volume in enumerate(spec.pod_template.volumes):
        field, name = f"{_TEMPLATE}.volumes[{index}]", str(volume["name"])
        if name in _OWN_VOLUMES or _OWN_VOLUME.fullmatch(name):
            raise InvalidSpecError(f"{field}.name", f"{name} is a volume of the operator's own")
        _refuse_second(name, seen, f"{field}.name")
        if volume.get("hostPath") is not None and not settings.allow_host_path:
            raise InvalidSpecError(
                f"{field}.hostPath", "this installation of the operator does not allow the node's disk"
            )
    return [
        _canonical_volume(_without_nulls(volume), f"{_TEMPLATE}.volumes[{index}]")
        for index, volume in enumerate(spec.pod_template.volumes)
    ]


def added_mounts(spec: SpeculativeDeploymentSpec) -> list[Manifest]:
    volumes = {volume["name"] for volume in spec.pod_template.volumes}
    seen = set[str]()
    for index, mount in enumerate(spec.pod_template.volume_mounts):
        field = f"{_TEMPLATE}.volumeMounts[{index}]"
        if mount.get("name") not in volumes:
            raise InvalidSpecError(f"{field}.name", f"{mount.get('name')} is not in {_TEMPLATE}.volumes")
        path = posixpath.normpath(str(mount["mountPath"]))
        if not path.startswith("/"):
            raise InvalidSpecError(f"{field}.mountPath", f"{path} is not an absolute path")
        if own := next((own for own in paths.RESERVED_PATHS if _overlap(own, path)), None):
            raise InvalidSpecError(
                f"{field}.mountPath", f"{path} overlaps {own}, which is the operator's own"
            )
        _refuse_second(path, seen, f"{field}.mountPath")
    return [_without_nulls(mount) for mount in spec.pod_template.volume_mounts]


def _without_own(given: Mapping[str, str], field: str, own: frozenset[str]) -> dict[str, str]:
    for key in sorted(given):
        if key in own or key.partition("/")[0] == constants.GROUP:
            raise InvalidSpecError(f"{field}.{key}", "is set by the operator")
    return dict(sorted(given.items()))


def _refuse_second(name: str, seen: set[str], field: str) -> None:
    if name in seen:
        raise InvalidSpecError(field, f"{name} is there twice")
    seen.add(name)


def _overlap(one: str, other: str) -> bool:
    return posixpath.commonpath((one, other)) in (one, other)


def _canonical_volume(volume: Manifest, field: str) -> Manifest:
    empty_dir = volume.get("emptyDir")
    if not isinstance(empty_dir, dict) or "sizeLimit" not in empty_dir:
        return volume
    limit = empty_dir["sizeLimit"]
    try:
        return {**volume, "emptyDir": {**empty_dir, "sizeLimit": canonical_quantity(limit)}}
    except ValueError as error:
        raise InvalidSpecError(f"{field}.emptyDir.sizeLimit", str(error)) from error


def _without_nulls(value: Any) -> Any:
    """A null means the same as an absent field, but would be sent, and then differ from what is stored."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
