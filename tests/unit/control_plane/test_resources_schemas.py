"""Every child is what the API servers from the oldest to the newest supported Kubernetes take."""

from __future__ import annotations

import dataclasses
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it has no py.typed
import pytest

from draftline_operator.models.resource import Manifest
from draftline_operator.resources.horizontal_pod_autoscaler import render_horizontal_pod_autoscaler
from support.speculative_deployments import FULL, MINIMAL, SETTINGS, changed, render_all, resource

NEWEST = kubernetes_validate.latest_version()
VERSIONS = [f"1.{minor}" for minor in range(30, int(NEWEST.split(".")[1]) + 1)]
FIRST_WITH_TOLERANCE = "1.35"
# Of other projects, without a schema here.
FOREIGN = ("keda.sh/v1alpha1", "monitoring.coreos.com/v1")
HOST = changed(MINIMAL, target__model__uri="file:///srv/models/target")


def children(spec: dict[str, Any]) -> list[Manifest]:
    settings = dataclasses.replace(SETTINGS, allow_host_path=True)
    return [child for child in render_all(resource(spec), settings) if child["apiVersion"] not in FOREIGN]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_child_is_valid(version: str) -> None:
    kinds = set()
    for child in (*children(FULL), *children(HOST)):
        kubernetes_validate.validate(child, version, strict=True)
        kinds.add(child["kind"])
    assert kinds == {
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "Job",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    }


@pytest.mark.parametrize("version", [version for version in VERSIONS if version >= FIRST_WITH_TOLERANCE])
def test_the_tolerance_is_valid_where_it_is_known(version: str) -> None:
    settings = dataclasses.replace(SETTINGS, has_hpa_tolerance=True)
    kubernetes_validate.validate(
        render_horizontal_pod_autoscaler(resource(FULL), settings), version, strict=True
    )


def test_the_schemas_refuse_what_is_wrong() -> None:
    broken = changed(children(MINIMAL)[0], automountToken=False)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)
