"""Requests and limits of the containers, in one spelling for each value."""

from __future__ import annotations

import math
from typing import Any

from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.quantity import canonical_quantity, parse_quantity
from draftline_operator.models.schema import as_object
from draftline_operator.models.spec import SpeculativeDeploymentSpec

_FIELD = "spec.podTemplate.resources"


def container_resources(spec: SpeculativeDeploymentSpec, *, with_accelerators: bool) -> dict[str, Any]:
    """What the user gives, and as many accelerators as tensor parallelism needs: requests equal limits."""
    requests, limits = _quantities(spec, "requests"), _quantities(spec, "limits")
    for name in sorted(requests.keys() & limits.keys()):
        if parse_quantity(requests[name]) > parse_quantity(limits[name]):
            raise InvalidSpecError(f"{_FIELD}.requests.{name}", f"is above {_FIELD}.limits.{name}")
    if with_accelerators and spec.accelerator is not None:
        accelerators = {spec.accelerator.resource_name: str(spec.accelerator_count)}
        requests, limits = requests | accelerators, limits | accelerators
    return {
        key: dict(sorted(values.items()))
        for key, values in (("limits", limits), ("requests", requests))
        if values
    }


def cpu_limit(spec: SpeculativeDeploymentSpec) -> int | None:
    """Whole CPUs that a container can keep busy, where it has a limit."""
    limit = _quantities(spec, "limits").get("cpu")
    return max(1, math.ceil(parse_quantity(limit))) if limit is not None else None


def _quantities(spec: SpeculativeDeploymentSpec, key: str) -> dict[str, str]:
    given = spec.pod_template.resources or {}
    for unknown in sorted(given.keys() - {"requests", "limits"}):
        raise InvalidSpecError(f"{_FIELD}.{unknown}", "is not supported; set requests and limits")
    values = as_object(given.get(key) or {}, f"{_FIELD}.{key}")
    return {name: _quantity(spec, f"{_FIELD}.{key}.{name}", name, value) for name, value in values.items()}


def _quantity(spec: SpeculativeDeploymentSpec, field: str, name: str, value: Any) -> str:
    is_accelerator = spec.accelerator is not None and name == spec.accelerator.resource_name
    if is_accelerator or name.endswith("/gpu"):
        raise InvalidSpecError(field, "accelerators are requested by spec.accelerator")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InvalidSpecError(field, "must be a quantity, such as 500m, 1.5Gi or 2")
    try:
        if parse_quantity(value) < 0:
            raise InvalidSpecError(field, "must not be negative")
        return canonical_quantity(value)
    except ValueError as error:
        raise InvalidSpecError(field, str(error)) from error
