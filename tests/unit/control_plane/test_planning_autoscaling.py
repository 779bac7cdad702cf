"""Whether replicas follow the load is told, and why not where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.models.kinds import HORIZONTAL_POD_AUTOSCALER, SCALED_OBJECT
from draftline_operator.models.observed import Object
from draftline_operator.planning.api_service_ownership import MetricsApiState
from draftline_operator.planning.autoscaling import autoscaling_condition
from support.observations import NAME, observed, owned

REFERENCE = {"apiVersion": "draftline.dev/v1alpha1", "kind": "SpeculativeDeployment", "name": NAME}


def autoscaler(*conditions: tuple[str, str, str], name: str = NAME, **parts: Any) -> Object:
    told = [{"type": kind, "status": status, "reason": reason} for kind, status, reason in conditions]
    spec = {"scaleTargetRef": parts.pop("target", REFERENCE)}
    return owned("HorizontalPodAutoscaler", name, spec=spec, status={"conditions": told}, **parts)


def condition(
    ours: Object | None = None,
    *others: Object,
    provider: str = "builtin",
    replicas: int = 1,
    is_wanted: bool = True,
    has_keda: bool = True,
    metrics_api: MetricsApiState | None = None,
) -> tuple[str, str]:
    named = {(HORIZONTAL_POD_AUTOSCALER, NAME): ours} if ours is not None else {}
    listed = (*([ours] if ours is not None else []), *others)
    found = autoscaling_condition(
        observed(named=named, autoscalers=listed),
        is_wanted=is_wanted,
        provider=provider,
        has_keda=has_keda,
        wanted_replicas=replicas,
        metrics_api=metrics_api,
    )
    return found.status, found.reason


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param([], ("Unknown", "Pending"), id="nothing-yet"),
        pytest.param(
            [("ScalingActive", "True", "ValidMetricFound")], ("True", "ValidMetricFound"), id="works"
        ),
        pytest.param(
            [("ScalingActive", "False", "FailedGetObjectMetric")],
            ("False", "AutoscalingDegraded"),
            id="metric-missing",
        ),
        pytest.param(
            [("AbleToScale", "False", "FailedGetScale")], ("False", "AutoscalingDegraded"), id="no-scale"
        ),
        pytest.param(
            [("AbleToScale", "False", "BackoffBoth"), ("ScalingActive", "True", "ValidMetricFound")],
            ("True", "ValidMetricFound"),
            id="waits-a-moment",
        ),
    ],
)
def test_the_autoscalers_own_word_is_passed_on(
    told: list[tuple[str, str, str]], expected: tuple[str, str]
) -> None:
    assert condition(autoscaler(*told)) == expected


def test_without_autoscaling_there_is_nothing_to_be_active() -> None:
    assert condition(is_wanted=False) == ("False", "NotConfigured")
    assert condition(provider="none") == ("False", "ProviderDisabled")


def test_keda_that_is_not_there_scales_nothing() -> None:
    assert condition(provider="keda", has_keda=False) == ("False", "ProviderDisabled")
    assert condition(provider="keda") == ("Unknown", "Pending")


def test_zero_replicas_pause_the_autoscaler() -> None:
    assert condition(autoscaler(), replicas=0) == ("False", "ScaledToZero")


@pytest.mark.parametrize("kind", ["Deployment", "SpeculativeDeployment"])
def test_somebody_elses_autoscaler_of_the_same_pods_is_told(kind: str) -> None:
    theirs = autoscaler(name="mine", uid="u", owner="o", target={"kind": kind, "name": NAME})
    assert condition(autoscaler(), theirs) == ("False", "OtherAutoscaler")
    assert condition(None, theirs, is_wanted=False) == ("False", "OtherAutoscaler")


def test_autoscalers_of_other_things_do_not_matter() -> None:
    theirs = autoscaler(name="mine", uid="u", owner="o", target={"kind": "Deployment", "name": "web"})
    assert condition(autoscaler(), theirs) == ("Unknown", "Pending")


def test_a_metrics_api_in_other_hands_is_told() -> None:
    state = MetricsApiState("conflict", "APIService belongs to somebody")
    assert condition(autoscaler(), metrics_api=state) == ("False", "MetricsApiConflict")


def test_keda_speaks_for_itself_and_its_autoscaler_is_no_rival() -> None:
    told = [{"type": "Ready", "status": "True", "reason": "ScaledObjectReady"}]
    scaled_object = owned("ScaledObject", NAME, status={"conditions": told})
    made_by_keda = autoscaler(name="keda-hpa-chat", uid="uid-of-chat", owner="chat")
    seen = observed(named={(SCALED_OBJECT, NAME): scaled_object}, autoscalers=(made_by_keda,))
    found = autoscaling_condition(
        seen, is_wanted=True, provider="keda", has_keda=True, wanted_replicas=1, metrics_api=None
    )
    assert (found.status, found.reason) == ("True", "ScaledObjectReady")
