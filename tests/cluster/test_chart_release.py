"""helm install, upgrade, test and uninstall against a real API server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.helm import CHART, ROOT, template
from support.kube.cluster import Cluster
from support.release import API_SERVICES, CRD, Release, release_of

BUILTIN = {"autoscaling": {"provider": "builtin"}}
CHAT = {
    "apiVersion": "draftline.dev/v1alpha1",
    "kind": "SpeculativeDeployment",
    "metadata": {"name": "chat"},
    "spec": {"target": {"model": {"uri": "pvc://models/target"}}},
}


@pytest.fixture
def release(cluster: Cluster) -> Iterator[Release]:
    with release_of(cluster) as release:
        yield release


def foreign_api_service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": name},
        "spec": {
            "group": "custom.metrics.k8s.io",
            "version": name.split(".")[0],
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"namespace": "monitoring", "name": "prometheus-adapter"},
        },
    }


def test_what_is_installed_is_what_was_rendered(release: Release) -> None:
    release.install(BUILTIN)
    for manifest in template(BUILTIN, namespace=release.namespace):
        if "helm.sh/hook" in manifest["metadata"].get("annotations", {}):
            continue
        metadata = manifest["metadata"]
        place = ("--namespace", metadata["namespace"]) if "namespace" in metadata else ()
        kind = f"{manifest['kind']}.{manifest['apiVersion'].partition('/')[0]}".removesuffix(".v1").lower()
        assert release.cluster.get(kind, metadata["name"], *place)
    assert release.environment()["DRAFTLINE_OPERATOR_AUTOSCALING_PROVIDER"] == "builtin"


def test_the_operator_may_do_what_it_has_to_and_no_more(release: Release, namespace: str) -> None:
    release.install(BUILTIN)
    assert release.may("patch", "speculativedeployments.draftline.dev")
    assert release.may("patch", "speculativedeployments.draftline.dev", subresource="status")
    assert release.may("create", "deployments.apps", namespace=namespace)
    assert release.may("patch", "pods", namespace=namespace)
    assert release.may("update", f"leases.coordination.k8s.io/{release.name}", namespace=release.namespace)
    assert release.may("patch", f"apiservices.apiregistration.k8s.io/{API_SERVICES[0]}")
    assert release.may("get", "configmaps/extension-apiserver-authentication", namespace="kube-system")
    assert not release.may("list", "secrets", namespace=namespace)
    assert not release.may("patch", "secrets", namespace=namespace)
    assert not release.may("patch", "apiservices.apiregistration.k8s.io/v1.apps")
    assert not release.may("create", "pods", subresource="exec", namespace=namespace)
    assert not release.may("update", "leases.coordination.k8s.io/other", namespace=release.namespace)


def test_a_namespaced_release_may_do_nothing_elsewhere(release: Release, namespace: str) -> None:
    release.install({"scope": "namespaced", "watchNamespaces": [namespace]})
    assert release.may("list", "speculativedeployments.draftline.dev", namespace=namespace)
    assert not release.may("list", "speculativedeployments.draftline.dev")
    assert not release.may("get", "configmaps", namespace="kube-system")
    assert not release.may("list", "nodes")


@pytest.mark.parametrize("taken", API_SERVICES)
def test_a_group_in_other_hands_is_left_to_them(release: Release, taken: str) -> None:
    theirs = foreign_api_service(taken)
    release.cluster.apply(theirs)
    try:
        complaint = release.refusal(BUILTIN)
        assert "custom.metrics.k8s.io belongs to Service monitoring/prometheus-adapter" in complaint
        assert "prometheus-adapter" in release.install({})
        assert release.environment()["DRAFTLINE_OPERATOR_AUTOSCALING_PROVIDER"] == "prometheus-adapter"
        found = release.cluster.get("apiservice", taken)
        assert found["spec"]["service"]["name"] == "prometheus-adapter"
    finally:
        release.cluster.delete(theirs)
    release.upgrade({})
    assert release.environment()["DRAFTLINE_OPERATOR_AUTOSCALING_PROVIDER"] == "builtin"
    release.upgrade({})
    assert release.environment()["DRAFTLINE_OPERATOR_AUTOSCALING_PROVIDER"] == "builtin", (
        "ours is no conflict"
    )


def test_uninstalling_leaves_resources_and_crd_and_nothing_else(release: Release, namespace: str) -> None:
    release.install(BUILTIN)
    release.cluster.apply(CHAT, namespace=namespace)
    release.uninstall("--no-hooks")
    for name in API_SERVICES:
        assert release.cluster.try_kubectl("get", "apiservice", name).returncode != 0
    kinds = (
        "deployments,services,secrets,serviceaccounts,roles,rolebindings,poddisruptionbudgets,"
        "networkpolicies,leases"
    )
    left = release.cluster.get(kinds, "--namespace", release.namespace)["items"]
    assert [item["metadata"]["name"] for item in left] == ["default"]
    for kind in ("clusterroles", "clusterrolebindings"):
        found = release.cluster.get(kind, "--selector=app.kubernetes.io/part-of=draftline")["items"]
        assert found == []
    assert release.cluster.get("specdep", "chat", "--namespace", namespace)["spec"] is not None
    assert release.cluster.get("crd", CRD)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    # No finalizer waits for an operator that is gone.
    release.cluster.kubectl("delete", "specdep", "chat", "--namespace", namespace, "--timeout=20s")


def test_an_upgrade_brings_the_new_fields_of_the_crd_and_keeps_what_is_stored(
    release: Release, namespace: str, tmp_path: Path
) -> None:
    release.install(BUILTIN, chart=_chart_of_the_past(tmp_path))
    release.cluster.apply(CHAT, namespace=namespace)
    with_field = {**CHAT, "spec": {**CHAT["spec"], "disruption": {"maxUnavailable": 2}}}  # type: ignore[dict-item]
    assert (
        "disruption"
        in release.cluster.try_kubectl(
            *("apply", "--server-side", "--namespace", namespace, "--validate=strict", "--filename=-"),
            stdin=json.dumps(with_field),
        ).stderr
    )
    release.upgrade(BUILTIN)
    release.cluster.kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=20s")
    kept = release.cluster.get("specdep", "chat", "--namespace", namespace)
    assert kept["spec"]["target"]["model"] == {"uri": "pvc://models/target"}
    release.cluster.apply(with_field, namespace=namespace)
    found = release.cluster.get("specdep", "chat", "--namespace", namespace)
    assert found["spec"]["disruption"]["maxUnavailable"] == 2


def _chart_of_the_past(folder: Path) -> Path:
    """The chart with a CRD that does not know spec.disruption yet."""
    chart = folder / "draftline"
    shutil.copytree(CHART, chart)
    (source,) = (ROOT / "crds").glob("*.yaml")
    crd = yaml.safe_load(source.read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del schema["properties"]["disruption"]
    schema["x-kubernetes-validations"] = [
        rule for rule in schema.get("x-kubernetes-validations", []) if "disruption" not in rule["rule"]
    ]
    crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    for path in (chart / "templates/crds").iterdir():
        text = yaml.safe_dump(crd)
        path.write_text(text.replace("{{", '{{ "{{" }}'))
    return chart


def test_no_replicas_are_no_replicas(release: Release) -> None:
    release.install({**BUILTIN, "replicas": 0})
    deployment = release.cluster.get("deployment", release.name, "--namespace", release.namespace)
    assert deployment["spec"]["replicas"] == 0
    for name in API_SERVICES:
        assert release.cluster.try_kubectl("get", "apiservice", name).returncode != 0


@pytest.mark.slow
def test_the_operator_of_the_image_is_healthy_and_goes_without_a_trace(
    release: Release, operator_image: str
) -> None:
    repository, _, tag = operator_image.rpartition(":")
    registry, _, path = repository.partition("/")
    values = {**BUILTIN, "image": {"registry": registry, "repository": path, "tag": tag}, "replicas": 2}
    release.install(values, "--wait", "--timeout", "120s")
    for name in API_SERVICES:
        release.cluster.wait("condition=Available", f"apiservice/{name}", seconds=60)
    assert "Phase:          Succeeded" in release.test()
    pods = release.cluster.get("pods", "--namespace", release.namespace)["items"]
    assert len([pod for pod in pods if pod["status"]["phase"] == "Running"]) == 2
    release.uninstall("--wait", "--timeout", "120s")
    names = {item["metadata"]["name"] for item in release.cluster.get("apiservices")["items"]}
    assert not names & set(API_SERVICES)
    left = release.cluster.get("pods,jobs,secrets,services", "--namespace", release.namespace)["items"]
    assert [item for item in left if not item["metadata"].get("deletionTimestamp")] == []
