"""Nothing but the resource's own figure ever lowers replicas, and a scale-in takes the idlest pods."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.constants import POD_DELETION_COST_ANNOTATION
from draftline_operator.models.spec import parse_spec
from draftline_operator.planning.deletion_cost import IDLE, LEAVING, STAYING, costs_to_write, deletion_costs
from draftline_operator.planning.replicas import wanted_replicas
from support.observations import serving_pod
from support.speculative_deployments import MINIMAL

ONE_TO_FOUR = {"minReplicas": 1, "maxReplicas": 4}
FOUR_TO_EIGHT = {"minReplicas": 4, "maxReplicas": 8}


@pytest.mark.parametrize(
    ("replicas", "autoscaling", "live", "wanted"),
    [
        pytest.param(0, None, 3, 0, id="zero-is-zero"),
        pytest.param(0, FOUR_TO_EIGHT, 4, 0, id="zero-is-zero-with-autoscaling"),
        pytest.param(3, None, 1, 3, id="more"),
        pytest.param(2, None, 5, 2, id="fewer"),
        pytest.param(3, ONE_TO_FOUR, 1, 3, id="what-the-autoscaler-wrote"),
        pytest.param(1, FOUR_TO_EIGHT, None, 4, id="no-fewer-than-the-autoscaler-would-bring-back"),
        pytest.param(9, FOUR_TO_EIGHT, 9, 8, id="no-more-than-the-autoscaler-would-take-away"),
    ],
)
def test_replicas_are_those_of_the_resource(
    replicas: int, autoscaling: dict[str, int] | None, live: int | None, wanted: int
) -> None:
    spec: dict[str, Any] = {**MINIMAL, "replicas": replicas}
    if autoscaling is not None:
        spec["autoscaling"] = autoscaling
    assert wanted_replicas(parse_spec(spec), live) == wanted


def test_the_idlest_pods_leave_first() -> None:
    costs = deletion_costs({"a": 9, "b": 2, "c": 0, "d": 5}, leaving=2)
    assert costs == {"c": IDLE, "b": LEAVING, "d": STAYING, "a": STAYING}


def test_where_enough_pods_are_idle_no_busy_one_leaves() -> None:
    costs = deletion_costs({"a": 1, "b": 0, "c": 0}, leaving=1)
    assert costs == {"b": IDLE, "c": IDLE, "a": STAYING}


def test_a_pod_whose_load_is_unknown_counts_as_the_busiest() -> None:
    assert deletion_costs({"a": None, "b": 30}, leaving=1) == {"b": LEAVING, "a": STAYING}


def test_idle_pods_need_no_annotation() -> None:
    pods = [serving_pod("a"), serving_pod("b")]
    assert costs_to_write(pods, {"a": 0, "b": 4}, 1) == {"b": STAYING}


def test_costs_that_are_right_are_not_written_again() -> None:
    told = serving_pod("b", metadata={"annotations": {POD_DELETION_COST_ANNOTATION: str(STAYING)}})
    assert costs_to_write([serving_pod("a"), told], {"a": 0, "b": 4}, 1) == {}


def test_a_cost_of_an_earlier_scale_in_is_taken_back() -> None:
    told = serving_pod("b", metadata={"annotations": {POD_DELETION_COST_ANNOTATION: str(STAYING)}})
    assert costs_to_write([serving_pod("a"), told], {"a": 3, "b": 0}, 1) == {"a": STAYING, "b": IDLE}


def test_pods_that_are_not_ready_leave_before_any_other() -> None:
    pods = [serving_pod("a"), serving_pod("b"), serving_pod("c", is_ready=False)]
    assert costs_to_write(pods, {"a": 3, "b": 1}, 1) == {}


def test_pods_that_are_leaving_already_are_not_counted() -> None:
    pods = [serving_pod("a"), serving_pod("b"), serving_pod("c", is_leaving=True)]
    assert costs_to_write(pods, {"a": 3, "b": 1}, 1) == {"b": LEAVING, "a": STAYING}
