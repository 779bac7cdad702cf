"""What every other test here takes for granted: the cluster does what a cluster does."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from support.audit_log import read_requests
from support.kube.cluster import Cluster
from support.kube.errors import ClusterFailed
from support.kube.local import LocalCluster
from support.waiting import wait_until

SERVE = ["python3", "-m", "http.server", "8000"]


def pod(name: str, image: str, command: list[str], **spec: Any) -> dict[str, Any]:
    resources = spec.pop("resources", {})
    container = {"name": "main", "image": image, "command": command, "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, **spec},
    }


def test_the_node_is_ready(cluster: Cluster) -> None:
    cluster.wait("condition=Ready", "node", "--all")


def test_a_pod_runs_from_a_local_image_and_its_log_can_be_read(
    cluster: Cluster, namespace: str, python_image: str
) -> None:
    say = ["python3", "-c", "print('said by the pod')"]
    cluster.apply(pod("speaker", python_image, say, restartPolicy="Never"), namespace=namespace)
    cluster.wait("jsonpath={.status.phase}=Succeeded", "pod/speaker", namespace=namespace)
    assert cluster.kubectl("logs", "speaker", "-n", namespace) == "said by the pod\n"


def test_a_command_can_be_run_in_a_container(cluster: Cluster, namespace: str, python_image: str) -> None:
    cluster.apply(pod("host", python_image, SERVE), namespace=namespace)
    cluster.wait("condition=Ready", "pod/host", namespace=namespace)
    said = cluster.kubectl("exec", "host", "-n", namespace, "--", "python3", "-c", "print(6 * 7)")
    assert said == "42\n"


def test_a_service_is_reached_by_name_from_a_pod(cluster: Cluster, namespace: str, python_image: str) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    probe = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    server = pod("server", python_image, SERVE)
    server["spec"]["containers"][0]["readinessProbe"] = probe
    cluster.apply(server, service, pod("client", python_image, SERVE), namespace=namespace)
    cluster.wait("condition=Ready", "pod/server", "pod/client", namespace=namespace)
    # Its endpoints and its name may take a moment.
    read = "import sys, urllib.request as u; print(u.urlopen('http://' + sys.argv[1], timeout=10).status)"
    command = ["exec", "client", "-n", namespace, "--", "python3", "-c", read]
    wait_until(lambda: cluster.try_kubectl(*command, "web").stdout == "200\n")
    assert cluster.kubectl(*command, f"web.{namespace}.svc.cluster.local") == "200\n"


def test_pods_get_as_many_gpus_as_the_node_has(local_cluster: LocalCluster, namespace: str) -> None:
    four = {"limits": {"nvidia.com/gpu": 4}}
    pods = [pod(f"user-{n}", "localhost/pause:1", ["/pause"], resources=four) for n in range(3)]
    local_cluster.apply(*pods, namespace=namespace)

    def states() -> list[str]:
        conditions = [
            p["status"].get("conditions", []) for p in local_cluster.get("pods", "-n", namespace)["items"]
        ]
        return sorted(
            c.get("reason", "Scheduled")
            for of_pod in conditions
            for c in of_pod
            if c["type"] == "PodScheduled"
        )

    wait_until(lambda: states() == ["Scheduled", "Scheduled", "Unschedulable"])


def test_an_eviction_that_would_break_a_budget_is_refused(
    cluster: Cluster, namespace: str, python_image: str
) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "keep"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}},
    }
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "kept", "namespace": namespace},
    }
    cluster.apply(budget, pod("kept", python_image, SERVE), namespace=namespace)
    cluster.wait("condition=Ready", "pod/kept", namespace=namespace)
    cluster.wait("jsonpath={.status.currentHealthy}=1", "pdb/keep", namespace=namespace)
    path = f"/api/v1/namespaces/{namespace}/pods/kept/eviction"
    refused = cluster.try_kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    assert refused.returncode != 0
    assert "violate the pod's disruption budget" in refused.stderr


def test_a_pod_is_reached_from_the_host_through_a_forwarded_port(
    local_cluster: LocalCluster, namespace: str, python_image: str
) -> None:
    local_cluster.apply(pod("server", python_image, SERVE), namespace=namespace)
    local_cluster.wait("condition=Ready", "pod/server", namespace=namespace)
    address = local_cluster.get("pod/server", "-n", namespace)["status"]["podIP"]
    port = local_cluster.forward(address, 8000)

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    wait_until(answers)


def test_another_user_may_do_what_rbac_grants_and_the_audit_log_has_it(
    local_cluster: LocalCluster, namespace: str
) -> None:
    mallory = Cluster(local_cluster.kubeconfig_for("mallory"), local_cluster.kubectl_path)
    with pytest.raises(ClusterFailed, match=r'pods is forbidden: User "mallory" cannot list'):
        mallory.kubectl("get", "pods", "-n", namespace)
    local_cluster.kubectl(
        "create", "rolebinding", "m", "--clusterrole=view", "--user=mallory", "-n", namespace
    )
    wait_until(lambda: mallory.try_kubectl("get", "pods", "-n", namespace).returncode == 0)

    def codes() -> set[int]:
        requests = read_requests(local_cluster.audit_log, user="mallory")
        return {request.code for request in requests if request.resource == "pods"}

    wait_until(lambda: codes() == {403, 200})
