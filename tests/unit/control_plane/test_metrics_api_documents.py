"""The documents of the metrics API, byte for byte as the autoscaler and the aggregator read them."""

from __future__ import annotations

import json

import pytest

from draftline_operator.planning.metrics_documents import (
    METRICS_VERSIONS,
    api_group,
    api_group_list,
    failure,
    metric_value_list,
    resource_list,
)

SAMPLED_AT = 1_795_953_600.9  # 2026-11-29T12:00:00.9Z


def compact(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


def test_a_v1beta2_metric_is_one_item_with_a_metric_identifier() -> None:
    document = metric_value_list(
        "v1beta2",
        namespace="team",
        name="chat",
        metric="draftline_requests_waiting",
        value=7,
        sampled_at=SAMPLED_AT,
    )
    assert compact(document) == (
        '{"kind":"MetricValueList","apiVersion":"custom.metrics.k8s.io/v1beta2","metadata":{},"items":['
        '{"describedObject":{"kind":"SpeculativeDeployment","namespace":"team","name":"chat",'
        '"apiVersion":"draftline.dev/v1alpha1"},'
        '"metric":{"name":"draftline_requests_waiting","selector":null},'
        '"timestamp":"2026-11-29T12:00:00Z","windowSeconds":0,"value":"7"}]}'
    )


def test_a_v1beta1_metric_is_one_item_with_a_name_and_a_window() -> None:
    document = metric_value_list(
        "v1beta1",
        namespace="team",
        name="chat",
        metric="draftline_requests_running",
        value=0,
        sampled_at=SAMPLED_AT,
    )
    assert compact(document) == (
        '{"kind":"MetricValueList","apiVersion":"custom.metrics.k8s.io/v1beta1","metadata":{},"items":['
        '{"describedObject":{"kind":"SpeculativeDeployment","namespace":"team","name":"chat",'
        '"apiVersion":"draftline.dev/v1alpha1"},'
        '"metricName":"draftline_requests_running",'
        '"timestamp":"2026-11-29T12:00:00Z","window":0,"value":"0","selector":null}]}'
    )


@pytest.mark.parametrize(
    ("value", "quantity"),
    [(0, "0"), (7, "7"), (2.5, "2500m"), (0.0004, "0"), (1e9, "1000000000"), (1.0, "1")],
)
def test_values_are_quantities_and_never_floats(value: float, quantity: str) -> None:
    document = metric_value_list(
        "v1beta2", namespace="n", name="r", metric="draftline_requests_waiting", value=value, sampled_at=0
    )
    assert document["items"][0]["value"] == quantity


def test_the_group_prefers_the_newer_version() -> None:
    assert compact(api_group()) == (
        '{"kind":"APIGroup","apiVersion":"v1","name":"custom.metrics.k8s.io","versions":['
        '{"groupVersion":"custom.metrics.k8s.io/v1beta2","version":"v1beta2"},'
        '{"groupVersion":"custom.metrics.k8s.io/v1beta1","version":"v1beta1"}],'
        '"preferredVersion":{"groupVersion":"custom.metrics.k8s.io/v1beta2","version":"v1beta2"}}'
    )
    (group,) = api_group_list()["groups"]
    assert group == {key: value for key, value in api_group().items() if key not in ("kind", "apiVersion")}


@pytest.mark.parametrize("version", METRICS_VERSIONS)
def test_the_resource_list_is_never_empty(version: str) -> None:
    document = resource_list(version)  # type: ignore[arg-type] # parametrized over the literal's values
    assert document["groupVersion"] == f"custom.metrics.k8s.io/{version}"
    assert [resource["name"] for resource in document["resources"]] == [
        "speculativedeployments.draftline.dev/draftline_requests_waiting",
        "speculativedeployments.draftline.dev/draftline_requests_running",
    ]
    assert all(
        resource["namespaced"] and resource["verbs"] == ["get"] and resource["kind"] == "MetricValueList"
        for resource in document["resources"]
    )


def test_a_failure_is_a_status_that_clients_of_kubernetes_understand() -> None:
    assert compact(failure("NotFound", "no such metric")) == (
        '{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",'
        '"message":"no such metric","reason":"NotFound","code":404}'
    )
