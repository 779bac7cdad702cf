"""Autoscaling: what the autoscaler reads, and how fast it may act on it."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any

import pytest

from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.quantity import parse_quantity
from draftline_operator.resources.horizontal_pod_autoscaler import render_horizontal_pod_autoscaler
from draftline_operator.resources.scaled_object import render_scaled_object
from draftline_server.core.stats import EngineStatistics
from draftline_server.metrics import ServerMetrics, ServerState
from support.speculative_deployments import FULL, MINIMAL, SETTINGS, changed, resource

WITH_TOLERANCE = dataclasses.replace(SETTINGS, has_hpa_tolerance=True)
SCALED = changed(MINIMAL, autoscaling={"minReplicas": 2, "maxReplicas": 6})


def spec_of(spec: dict[str, Any], settings: Any = SETTINGS) -> dict[str, Any]:
    rendered: dict[str, Any] = render_horizontal_pod_autoscaler(resource(spec), settings)["spec"]
    return rendered


def with_watermarks(low: int, high: int) -> dict[str, Any]:
    depth = {"highWatermark": high, "lowWatermark": low}
    return changed(SCALED, autoscaling__queueDepth=depth)


def test_the_resource_itself_is_scaled() -> None:
    assert spec_of(SCALED)["scaleTargetRef"] == {
        "apiVersion": "draftline.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "name": "chat",
    }
    assert (spec_of(SCALED)["minReplicas"], spec_of(SCALED)["maxReplicas"]) == (2, 6)


def test_totals_of_waiting_and_running_requests_are_compared_with_watermark_and_seats() -> None:
    metrics = spec_of(FULL)["metrics"]
    read = {
        metric["object"]["metric"]["name"]: metric["object"]["target"]["averageValue"] for metric in metrics
    }
    assert read == {"draftline_requests_waiting": "4", "draftline_requests_running": "16"}
    for metric in metrics:
        assert metric["object"]["target"]["type"] == "AverageValue"
        assert metric["object"]["describedObject"] == spec_of(FULL)["scaleTargetRef"]


def test_the_metrics_are_named_as_the_servers_name_them() -> None:
    state = ServerState(statistics=EngineStatistics(), is_draining=False, description=None)
    exported = ServerMetrics(version="1", read_state=lambda: state).render().decode()
    for metric in spec_of(SCALED)["metrics"]:
        assert f"\n{metric['object']['metric']['name']} 0.0\n" in exported


def test_by_default_replicas_go_up_at_once_and_down_one_a_minute_after_five() -> None:
    behavior = spec_of(SCALED)["behavior"]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert behavior["scaleUp"]["policies"] == [{"type": "Pods", "value": 6, "periodSeconds": 15}]
    assert behavior["scaleDown"] == {
        "stabilizationWindowSeconds": 300,
        "selectPolicy": "Min",
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    }


def test_a_direction_that_is_given_replaces_its_default_and_leaves_the_other() -> None:
    behavior = spec_of(FULL)["behavior"]
    assert behavior["scaleDown"] == {"stabilizationWindowSeconds": 60}
    assert behavior["scaleUp"] == spec_of(changed(FULL, autoscaling__behavior=None))["behavior"]["scaleUp"]


@pytest.mark.parametrize("rules", [None, 3, []])
def test_a_direction_that_is_no_object_is_refused(rules: object) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec.autoscaling.behavior.scaleDown: must be an object"):
        spec_of(changed(FULL, autoscaling__behavior={"scaleDown": rules}))


@pytest.mark.parametrize(
    ("low", "high", "held_from"),
    [(1, 4, "0.25"), (3, 4, "0.75"), (1, 3, "0.333"), (1, 1000, "0.001"), (0, 4, "0.001")],
)
def test_load_down_to_the_low_watermark_holds_the_replicas(low: int, high: int, held_from: str) -> None:
    tolerance = spec_of(with_watermarks(low, high), WITH_TOLERANCE)["behavior"]["scaleDown"]["tolerance"]
    assert 1 - parse_quantity(tolerance) == Decimal(held_from)


def test_without_any_load_the_replicas_always_go_down() -> None:
    # The autoscaler leaves replicas alone while 1 - load / target <= tolerance.
    for low, high in ((0, 4), (0, 1), (1, 1_000_000)):
        tolerance = spec_of(with_watermarks(low, high), WITH_TOLERANCE)["behavior"]["scaleDown"]["tolerance"]
        assert parse_quantity(tolerance) < 1


def test_the_tolerance_is_for_clusters_that_know_it_and_the_users_own_goes_first() -> None:
    assert "tolerance" not in spec_of(SCALED)["behavior"]["scaleDown"]
    assert "tolerance" not in spec_of(SCALED, WITH_TOLERANCE)["behavior"]["scaleUp"]
    own = changed(SCALED, autoscaling__behavior={"scaleDown": {"tolerance": "0.05"}})
    assert spec_of(own, WITH_TOLERANCE)["behavior"]["scaleDown"]["tolerance"] == "0.05"
    given = changed(SCALED, autoscaling__behavior={"scaleDown": {"stabilizationWindowSeconds": 60}})
    assert spec_of(given, WITH_TOLERANCE)["behavior"]["scaleDown"]["tolerance"] == "750m"


def test_zero_replicas_pause_keda_which_would_else_raise_them() -> None:
    def annotations(replicas: int | None) -> dict[str, str]:
        rendered = render_scaled_object(resource(changed(SCALED, replicas=replicas)), SETTINGS)
        found: dict[str, str] = rendered["metadata"].get("annotations", {})
        return found

    assert annotations(0) == {"autoscaling.keda.sh/paused": "true"}
    assert annotations(2) == annotations(None) == {}


def test_keda_scales_the_same_by_the_same_totals() -> None:
    hpa = spec_of(FULL, WITH_TOLERANCE)
    keda = render_scaled_object(resource(FULL), WITH_TOLERANCE)["spec"]
    assert keda["scaleTargetRef"] == hpa["scaleTargetRef"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    read = [
        (trigger["metadata"]["valueLocation"], trigger["metadata"]["targetValue"])
        for trigger in keda["triggers"]
    ]
    assert read == [
        (metric["object"]["metric"]["name"], metric["object"]["target"]["averageValue"])
        for metric in hpa["metrics"]
    ]
    for trigger in keda["triggers"]:
        assert trigger["metricType"] == "AverageValue"
        assert trigger["metadata"]["url"] == f"{SETTINGS.metrics_url}/queue/models/chat"
