"""The metrics API on a real API server: registered by the chart, read by the real autoscaler, which scales.

The process runs on the node with the ServiceAccount that the chart made, so its rights are tested, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftline_operator.models.resource import RenderSettings, Resource
from draftline_operator.models.spec import parse_spec
from draftline_operator.resources.horizontal_pod_autoscaler import render_horizontal_pod_autoscaler
from support.helm import ROOT
from support.kube.components import INSIDE_SERVER
from support.kube.local import LocalCluster
from support.kube.sandbox import NODE_ADDRESS
from support.release import API_SERVICES, Release, release_of
from support.waiting import wait_until

PORT = 18443
VALUES = {"autoscaling": {"provider": "builtin", "metricsApi": {"port": PORT}}}
AT_ONCE = {
    "scaleUp": {"stabilizationWindowSeconds": 0},
    "scaleDown": {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Pods", "value": 8, "periodSeconds": 1}],
    },
}
SPEC = {
    "target": {"model": {"uri": "pvc://models/target"}},
    "serving": {"maxConcurrentRequests": 8},
    "autoscaling": {
        "minReplicas": 1,
        "maxReplicas": 6,
        "queueDepth": {"highWatermark": 4},
        "behavior": AT_ONCE,
    },
}


@dataclass
class Served:
    """A release whose metrics API runs."""

    cluster: LocalCluster
    release: Release
    loads: Path
    log: Path

    def set_load(self, resource: str, **load: int) -> None:
        """Without figures the load becomes unknown."""
        known = json.loads(self.loads.read_text())
        known.pop(resource, None)
        part = self.loads.with_suffix(".part")
        part.write_text(json.dumps({**known, **({resource: load} if load else {})}))
        part.rename(self.loads)

    def is_available(self) -> bool:
        conditions = [
            condition
            for name in API_SERVICES
            for condition in self.cluster.get("apiservice", name).get("status", {}).get("conditions", [])
        ]
        return [c["status"] for c in conditions if c["type"] == "Available"] == ["True", "True"]


@pytest.fixture(scope="module")
def served(local_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("metrics-api")
    loads, log = folder / "loads.json", folder / "log"
    loads.write_text("{}")
    with release_of(local_cluster) as release:
        release.install(VALUES)
        release.lead_metrics_api_to(NODE_ADDRESS, PORT)
        kubeconfig = release.kubeconfig_of_operator(local_cluster, INSIDE_SERVER, folder)
        script = str(ROOT / "tests/support/serve_metrics_api.py")
        arguments = [
            str(kubeconfig),
            release.namespace,
            release.metrics_api,
            NODE_ADDRESS,
            str(PORT),
            str(loads),
        ]
        command = local_cluster.command_inside(sys.executable, script, *arguments)
        with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                world = Served(local_cluster, release, loads, log)
                wait_until(lambda: _alive(process, log) and world.is_available(), seconds=60)
                yield world
            finally:
                process.terminate()
                process.wait(timeout=20)


def _alive(process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    return True


def deploy(served: Served, namespace: str, name: str) -> None:
    """A resource without an operator, and the autoscaler that the operator would make for it."""
    manifest = {
        "apiVersion": "draftline.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": name},
        "spec": {**SPEC, "replicas": 1},
    }
    served.cluster.apply(manifest, namespace=namespace)
    found = served.cluster.get("specdep", name, "--namespace", namespace)["metadata"]
    status = {"status": {"selector": f"app.kubernetes.io/instance={name}", "replicas": 1}}
    served.cluster.kubectl(
        *("patch", "specdep", name, "--namespace", namespace, "--subresource=status", "--type=merge"),
        *("--patch", json.dumps(status)),
    )
    resource = Resource(
        name=name,
        namespace=namespace,
        uid=found["uid"],
        generation=1,
        spec=parse_spec({**SPEC, "replicas": 1}),
    )
    served.cluster.apply(
        render_horizontal_pod_autoscaler(resource, RenderSettings(default_image="unused")),
        namespace=namespace,
    )


def replicas_of(served: Served, namespace: str, name: str) -> int:
    return int(served.cluster.get("specdep", name, "--namespace", namespace)["spec"]["replicas"])


def autoscaler_condition(served: Served, namespace: str, name: str, kind: str) -> dict[str, Any]:
    autoscaler = served.cluster.get("hpa", name, "--namespace", namespace)
    conditions = autoscaler.get("status", {}).get("conditions", [])
    found: dict[str, Any] = next((each for each in conditions if each["type"] == kind), {})
    return found


def test_the_autoscaler_reads_the_queue_and_scales_the_resource_up_and_down(
    served: Served, namespace: str
) -> None:
    key = f"{namespace}/chat"
    served.set_load(key, waiting=0, running=1)
    deploy(served, namespace, "chat")
    # The controller manager looks for new API groups every 30 seconds.
    wait_until(
        lambda: autoscaler_condition(served, namespace, "chat", "ScalingActive").get("status") == "True",
        seconds=60,
    )
    served.set_load(key, waiting=20, running=8)
    took = wait_until(lambda: replicas_of(served, namespace, "chat") == 5)
    print(f"20 waiting, high watermark 4: 5 replicas after {took:.1f} s")
    condition = autoscaler_condition(served, namespace, "chat", "ScalingActive")
    assert (condition["status"], condition["reason"]) == ("True", "ValidMetricFound")

    # Running requests hold the pods that they need when the queue is empty for a moment: 24 / 8.
    served.set_load(key, waiting=0, running=24)
    wait_until(lambda: replicas_of(served, namespace, "chat") == 3)

    # Nobody knows the load: nothing is scaled, and the autoscaler says why.
    served.set_load(key)
    wait_until(
        lambda: (
            autoscaler_condition(served, namespace, "chat", "ScalingActive").get("reason")
            == "FailedGetObjectMetric"
        )
    )
    time.sleep(5)
    assert replicas_of(served, namespace, "chat") == 3

    served.set_load(key, waiting=0, running=0)
    wait_until(lambda: replicas_of(served, namespace, "chat") == 1)
    served.set_load(key, waiting=1000, running=8)
    wait_until(lambda: replicas_of(served, namespace, "chat") == 6)


def test_both_versions_are_answered_through_the_api_server(served: Served, namespace: str) -> None:
    served.set_load(f"{namespace}/chat", waiting=3, running=2)
    for version in ("v1beta1", "v1beta2"):
        group = f"/apis/custom.metrics.k8s.io/{version}"
        resource = f"namespaces/{namespace}/speculativedeployments.draftline.dev/chat"
        for metric, value in (("draftline_requests_waiting", "3"), ("draftline_requests_running", "2")):
            document = json.loads(served.cluster.kubectl("get", "--raw", f"{group}/{resource}/{metric}"))
            assert [item["value"] for item in document["items"]] == [value]
        assert json.loads(served.cluster.kubectl("get", "--raw", group))["groupVersion"].endswith(version)


def test_a_user_reads_only_what_rbac_grants(served: Served, namespace: str) -> None:
    served.set_load(f"{namespace}/chat", waiting=3, running=2)
    path = (
        f"/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}"
        "/speculativedeployments.draftline.dev/chat/draftline_requests_waiting"
    )
    refused = served.cluster.try_kubectl("get", "--raw", path, "--as=eve")
    assert "Forbidden" in refused.stderr or "forbidden" in refused.stderr
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "reads-load"},
        "rules": [
            {
                "apiGroups": ["custom.metrics.k8s.io"],
                "resources": ["speculativedeployments.draftline.dev/draftline_requests_waiting"],
                "verbs": ["get"],
            }
        ],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "reads-load"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reads-load"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "alice"}],
    }
    served.cluster.apply(role, binding, namespace=namespace)
    wait_until(lambda: served.cluster.try_kubectl("get", "--raw", path, "--as=alice").returncode == 0)
    other = path.replace("requests_waiting", "requests_running")
    assert served.cluster.try_kubectl("get", "--raw", other, "--as=alice").returncode != 0


def test_an_unknown_metric_is_not_found_for_kubectl_too(served: Served, namespace: str) -> None:
    path = (
        f"/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}"
        "/speculativedeployments.draftline.dev/nobody/draftline_requests_waiting"
    )
    result = served.cluster.try_kubectl("get", "--raw", path)
    assert result.returncode != 0
    assert "there is no draftline_requests_waiting" in result.stderr


def test_discovery_goes_on_without_a_complaint(served: Served) -> None:
    # An empty list of resources would make every kubectl command print an error.
    listed = served.cluster.try_kubectl("api-resources", "--cached=false")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "speculativedeployments" in listed.stdout


def test_namespaces_can_be_deleted_while_the_group_is_served(served: Served) -> None:
    served.cluster.kubectl("create", "namespace", f"{served.release.namespace}-short")
    served.cluster.kubectl("delete", "namespace", f"{served.release.namespace}-short", "--timeout=30s")


def test_an_upgrade_keeps_certificate_and_registration(served: Served) -> None:
    place = ("secret", served.release.metrics_api, "--namespace", served.release.namespace)
    before = served.cluster.get(*place)["data"]
    bundles = [served.cluster.get("apiservice", name)["spec"]["caBundle"] for name in API_SERVICES]
    served.release.upgrade({**VALUES, "log": {"level": "debug"}})
    assert served.cluster.get(*place)["data"] == before
    assert [served.cluster.get("apiservice", name)["spec"]["caBundle"] for name in API_SERVICES] == bundles
    assert served.is_available()
    assert served.release.environment()["DRAFTLINE_OPERATOR_LOG_LEVEL"] == "debug"


def test_an_apiservice_that_somebody_takes_over_is_left_to_them_and_reported(served: Served) -> None:
    name = API_SERVICES[0]
    place = {"namespace": "monitoring", "name": "prometheus-adapter", "port": 443}

    def point_to(service: dict[str, Any]) -> None:
        change = json.dumps({"spec": {"service": service}})
        served.cluster.kubectl("patch", "apiservice", name, "--type=merge", "--patch", change)

    ours = served.cluster.get("apiservice", name)["spec"]["service"]
    point_to(place)
    try:
        # The operator looks every half minute.
        wait_until(lambda: "Service monitoring/prometheus-adapter" in served.log.read_text(), seconds=60)
        assert served.cluster.get("apiservice", name)["spec"]["service"] == place
    finally:
        point_to(ours)
    wait_until(lambda: served.log.read_text().splitlines()[-1].find("status=ok") > 0, seconds=60)
