"""A release of the chart on a test cluster, and the operator's ServiceAccount to act as."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.helm import CHART, helm, run_helm
from support.kube.cluster import Cluster
from support.kube.errors import ClusterFailed
from support.kube.local import LocalCluster

CRD = "speculativedeployments.draftline.dev"
API_SERVICES = ("v1beta1.custom.metrics.k8s.io", "v1beta2.custom.metrics.k8s.io")


@dataclass(frozen=True)
class Release:
    """Named like the chart, in a namespace of its own."""

    cluster: Cluster
    namespace: str
    name: str = "draftline"

    @property
    def metrics_api(self) -> str:
        """Of the Service and the Secret."""
        return f"{self.name}-metrics-api"

    def install(self, values: Mapping[str, Any], *flags: str, chart: Path = CHART) -> str:
        command = ("install", self.name, str(chart), "--namespace", self.namespace, "--take-ownership")
        return helm(*command, *flags, values=values, kubeconfig=self.cluster.kubeconfig)

    def refusal(self, values: Mapping[str, Any]) -> str:
        """Why an installation fails."""
        command = ("install", self.name, str(CHART), "--namespace", self.namespace, "--take-ownership")
        result = run_helm(*command, values=values, kubeconfig=self.cluster.kubeconfig)
        assert result.returncode != 0, "it was installed"
        return result.stderr

    def upgrade(self, values: Mapping[str, Any], *flags: str) -> str:
        command = ("upgrade", self.name, str(CHART), "--namespace", self.namespace)
        return helm(*command, *flags, values=values, kubeconfig=self.cluster.kubeconfig)

    def test(self) -> str:
        command = ("test", self.name, "--namespace", self.namespace, "--timeout", "90s")
        return helm(*command, kubeconfig=self.cluster.kubeconfig)

    def uninstall(self, *flags: str) -> str:
        command = ("uninstall", self.name, "--namespace", self.namespace, "--ignore-not-found")
        return helm(*command, *flags, kubeconfig=self.cluster.kubeconfig)

    def environment(self) -> dict[str, str]:
        """Of the operator's container, where it is a plain value."""
        deployment = self.cluster.get("deployment", self.name, "--namespace", self.namespace)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return {variable["name"]: variable.get("value", "") for variable in container["env"]}

    def may(self, verb: str, resource: str, *, namespace: str | None = None, subresource: str = "") -> bool:
        """Whether the operator's ServiceAccount may do this, by what the API server says."""
        account = f"system:serviceaccount:{self.namespace}:{self.name}"
        place = ("--namespace", namespace) if namespace is not None else ("--all-namespaces",)
        part = (f"--subresource={subresource}",) if subresource else ()
        asked = ("auth", "can-i", verb, resource, *place, *part, f"--as={account}")
        return self.cluster.try_kubectl(*asked).stdout.strip() == "yes"

    def lead_metrics_api_to(self, address: str, port: int) -> None:
        """Leads its Service to a process on the node, where no pod of the operator is ready."""
        labels = {
            "kubernetes.io/service-name": self.metrics_api,
            "endpointslice.kubernetes.io/managed-by": "tests",
        }
        endpoints = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{self.metrics_api}-by-hand", "labels": labels},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        }
        self.cluster.apply(endpoints, namespace=self.namespace)

    def kubeconfig_of_operator(self, cluster: LocalCluster, server: str, folder: Path) -> Path:
        """With a token of its ServiceAccount, and so with the rights that the chart gives it."""
        token = cluster.kubectl("create", "token", self.name, "--namespace", self.namespace).strip()
        document = yaml.safe_load(cluster.kubeconfig.read_text())
        document["clusters"][0]["cluster"]["server"] = server
        document["users"][0]["user"] = {"token": token}
        path = folder / "operator.kubeconfig"
        path.write_text(yaml.safe_dump(document))
        return path


@contextmanager
def release_of(cluster: Cluster) -> Iterator[Release]:
    """Not installed yet; in the end nothing of it is left but the CRD."""
    namespace = f"draftline-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", namespace)
    release = Release(cluster, namespace)
    try:
        yield release
    finally:
        release.uninstall("--no-hooks")
        for name in API_SERVICES:
            _delete_quietly(cluster, "apiservice", name)
        _delete_quietly(cluster, "namespace", namespace, "--wait=false")


def _delete_quietly(cluster: Cluster, *what: str) -> None:
    try:
        cluster.kubectl("delete", *what, "--ignore-not-found")
    except ClusterFailed as error:
        print(error)
