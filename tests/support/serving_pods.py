"""Real serving pods in tests: the server's image without torch, which is mounted from this environment."""

from __future__ import annotations

import secrets
import sysconfig
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftline_operator import constants
from draftline_operator.planning.deletion_cost import is_ready
from support.kube.local import LocalCluster

_VOLUME = "site-packages"

Object = dict[str, Any]


def host_torch() -> dict[str, Any]:
    """A podTemplate that gives serving pods the packages of this Python."""
    packages = sysconfig.get_paths()["purelib"]
    return {
        "volumes": [{"name": _VOLUME, "hostPath": {"path": packages, "type": "Directory"}}],
        "volumeMounts": [{"name": _VOLUME, "mountPath": "/opt/host-packages", "readOnly": True}],
        "env": [{"name": "PYTHONPATH", "value": "/opt/host-packages"}],
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
    }


def small_pods() -> dict[str, Any]:
    """The same, of pods that have to share few processors with others."""
    template = host_torch()
    threads = {"name": "OMP_NUM_THREADS", "value": "1"}  # more only get in each other's way
    resources = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "3Gi"}}
    return {**template, "env": [*template["env"], threads], "resources": resources}


@dataclass(frozen=True)
class ServingPods:
    """A SpeculativeDeployment on a cluster, and the pods that it has."""

    cluster: LocalCluster
    namespace: str
    name: str = "chat"

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}"

    def apply(self, spec: dict[str, Any]) -> None:
        resource = {
            "apiVersion": constants.API_VERSION,
            "kind": constants.KIND,
            "metadata": {"name": self.name},
            "spec": spec,
        }
        self.cluster.apply(resource, namespace=self.namespace)

    def resource(self) -> Object:
        path = f"/apis/{constants.API_VERSION}/namespaces/{self.namespace}/{constants.PLURAL}/{self.name}"
        resource: Object = self.cluster.request("GET", path)
        return resource

    def condition(self, kind: str) -> Object:
        """Of the resource; empty while there is none."""
        conditions = self.resource().get("status", {}).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def get(self, *what: str) -> Object:
        return self.cluster.get(*what, "--namespace", self.namespace)

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl(*arguments, "--namespace", self.namespace)

    def scale(self, replicas: int) -> None:
        self.kubectl("scale", f"specdep/{self.name}", f"--replicas={replicas}")

    def evict(self, pod: str) -> None:
        """As `kubectl drain` does; `urllib.error.HTTPError` 429 where the budget says no."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        self.cluster.request("POST", f"{self._path}/pods/{pod}/eviction", eviction)

    def pods(self) -> list[Object]:
        """All that there are, the leaving ones too."""
        labels = f"{constants.INSTANCE_LABEL}={self.name},{constants.COMPONENT_LABEL}={constants.SERVING}"
        pods: list[Object] = self.cluster.request("GET", f"{self._path}/pods?labelSelector={labels}")["items"]
        return pods

    def ready(self) -> list[str]:
        """Names of those that serve and are not leaving."""
        return sorted(pod["metadata"]["name"] for pod in self.pods() if is_ready(pod) and not is_leaving(pod))

    def address(self, pod: str) -> str:
        """Within the cluster."""
        return str(self.get("pod", pod)["status"]["podIP"])

    def in_flight(self, pod: str) -> int | None:
        """Requests that run or wait in a pod, by its own metrics; None where it does not answer."""
        path = f"{self._path}/pods/{pod}:{constants.ADMIN_PORT}/proxy/metrics"
        try:
            lines = [line.split() for line in self.cluster.request("GET", path).splitlines()]
        except (urllib.error.URLError, TimeoutError):
            return None
        counted = (constants.RUNNING_METRIC, constants.WAITING_METRIC)
        return sum(int(float(line[1])) for line in lines if line and line[0] in counted)

    def least_in_flight(self) -> int:
        """Of the pods that serve and are not leaving."""
        return min((self.in_flight(pod) or 0 for pod in self.ready()), default=0)

    def wait_until_settled(self, replicas: int, *, seconds: float = 180.0) -> None:
        """So many pods serve, and nothing leaves or comes."""
        self.wait_until(
            lambda: len(self.pods()) == replicas == len(self.ready()), f"{replicas} pods serve", seconds
        )

    def wait_until(self, holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        give_up_at = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < give_up_at, f"not within {seconds:g} s: {what}\n{self.describe()}"
            time.sleep(0.5)

    def describe(self) -> str:
        """For a failure: what there is, why, and the last words of the pods."""
        parts = [
            ("get", "specdep,jobs,pods,hpa,pdb", "--output=wide"),
            ("get", f"specdep/{self.name}", "--output=jsonpath={.status.conditions}"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "--selector", f"{constants.INSTANCE_LABEL}={self.name}", "--tail=8", "--prefix"),
        ]
        shown = [
            self.cluster.try_kubectl(*part, "--namespace", self.namespace).stdout[-6000:] for part in parts
        ]
        return "\n".join(shown)


def is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


@contextmanager
def serving_pods(cluster: LocalCluster, spec: dict[str, Any], replicas: int = 1) -> Iterator[ServingPods]:
    """A resource in a namespace of its own, when so many pods of it serve."""
    namespace = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", namespace)
    serving = ServingPods(cluster, namespace)
    try:
        serving.apply(spec)
        serving.wait_until(lambda: serving.condition("Ready").get("status") == "True", "Ready", 240)
        serving.wait_until_settled(replicas)
        yield serving
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
