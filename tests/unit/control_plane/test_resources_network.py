"""Services, scrapes and the network policy: who finds the pods, and who may talk to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from draftline_operator.resources.network_policy import render_network_policy
from draftline_operator.resources.service_monitor import render_service_monitor
from draftline_operator.resources.services import render_client_service, render_headless_service
from support.speculative_deployments import (
    FULL,
    MINIMAL,
    SETTINGS,
    changed,
    deployment,
    preflight_job,
    resource,
    server_of,
)

FETCHED = {"target": {"model": {"uri": "hf://org/name"}}}


def policy(spec: dict[str, Any]) -> dict[str, Any]:
    rendered: dict[str, Any] = render_network_policy(resource(spec), SETTINGS)["spec"]
    return rendered


def egress_ports(spec: dict[str, Any]) -> set[tuple[str, int]]:
    return {(port["protocol"], port["port"]) for rule in policy(spec)["egress"] for port in rule["ports"]}


def test_clients_get_one_address_and_those_that_balance_get_every_pod() -> None:
    client, headless = render_client_service(resource()), render_headless_service(resource())
    assert client["metadata"]["name"] == "chat"
    assert client["spec"]["type"] == "ClusterIP"
    assert "clusterIP" not in client["spec"]
    assert headless["metadata"]["name"] == "chat-pods"
    assert headless["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in headless["spec"]


def test_services_lead_to_ports_that_the_pods_have() -> None:
    ports = {port["name"]: port["containerPort"] for port in server_of(deployment(resource()))["ports"]}
    for service in (render_client_service(resource()), render_headless_service(resource())):
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        assert service["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"


def test_each_pod_is_scraped_once() -> None:
    monitor = render_service_monitor(resource(), SETTINGS)["spec"]
    (endpoint,) = monitor["endpoints"]
    services = [render_client_service(resource()), render_headless_service(resource())]
    selected = [
        service["metadata"]["name"]
        for service in services
        if monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        and any(port["name"] == endpoint["port"] for port in service["spec"]["ports"])
    ]
    assert selected == ["chat-pods"]


def test_a_prometheus_that_selects_by_a_label_finds_the_monitors_and_ours_stay() -> None:
    labels = {"release": "prometheus", "app.kubernetes.io/name": "other"}
    settings = dataclasses.replace(SETTINGS, service_monitor_labels=labels)
    found = render_service_monitor(resource(), settings)["metadata"]["labels"]
    assert found["release"] == "prometheus"
    assert found["app.kubernetes.io/name"] == "draftline"


def test_the_policy_covers_serving_and_preflight_pods_of_this_resource_alone() -> None:
    selected = policy(FULL)["podSelector"]["matchLabels"].items()
    for manifest in (deployment(resource(FULL)), preflight_job(resource(FULL))):
        assert selected <= manifest["spec"]["template"]["metadata"]["labels"].items()
    other = deployment(resource(FULL, name="other"))["spec"]["template"]["metadata"]["labels"]
    assert not selected <= other.items()


def test_calls_come_from_the_whole_cluster_and_scrapes_from_operator_and_collectors() -> None:
    calls, scrapes = policy(MINIMAL)["ingress"]
    assert calls == {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": 50051}]}
    assert scrapes["ports"] == [{"protocol": "TCP", "port": 9090}]
    operator, collectors = scrapes["from"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "draftline-system"}
    assert "prometheus" in collectors["podSelector"]["matchExpressions"][0]["values"]
    elsewhere = dataclasses.replace(SETTINGS, operator_namespace="elsewhere")
    assert (
        render_network_policy(resource(MINIMAL), elsewhere)["spec"]["ingress"] != policy(MINIMAL)["ingress"]
    )


def test_pods_that_fetch_nothing_may_only_resolve_names() -> None:
    assert egress_ports(MINIMAL) == {("UDP", 53), ("TCP", 53)}
    never_run = changed(MINIMAL, draft={"model": {"uri": "hf://org/draft"}}, speculation__methods=["NGram"])
    assert egress_ports(never_run) == {("UDP", 53), ("TCP", 53)}


@pytest.mark.parametrize(
    ("name", "value", "port"),
    [
        ("HF_ENDPOINT", "http://hub.example.com:8080", 8080),
        ("HF_ENDPOINT", "http://hub.example.com", 80),
        ("AWS_ENDPOINT_URL", "http://minio.storage.svc:9000/", 9000),
        ("https_proxy", "http://proxy:3128", 3128),
        ("HF_ENDPOINT", "https://hub.example.com", 443),
        ("HF_ENDPOINT", "http://hub:port", 443),
        ("OTHER", "http://other:1234", 443),
    ],
)
def test_pods_that_fetch_reach_https_and_the_endpoints_of_their_environment(
    name: str, value: str, port: int
) -> None:
    spec = changed(FETCHED, podTemplate__env=[{"name": name, "value": value}])
    assert egress_ports(spec) == {("UDP", 53), ("TCP", 53), ("TCP", 443), ("TCP", port)}


def test_an_endpoint_from_elsewhere_opens_nothing() -> None:
    source = {"configMapKeyRef": {"name": "hub", "key": "url"}}
    spec = changed(FETCHED, podTemplate__env=[{"name": "HF_ENDPOINT", "valueFrom": source}])
    assert egress_ports(spec) == egress_ports(FETCHED)
