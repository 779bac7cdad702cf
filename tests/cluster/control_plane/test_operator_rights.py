"""What the operator asks of the API server in a whole life of a resource is what the chart grants it.

The audit log knows every request of its ServiceAccount. Each has to be covered by a right, and each right has
to have covered a request; what is left over is named here, and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from draftline_operator.cluster.client import ClusterClient, load_configuration
from draftline_operator.models.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    NETWORK_POLICY,
    SCALED_OBJECT,
    SERVICE_MONITOR,
    SPECULATIVE_DEPLOYMENT,
    Kind,
)
from draftline_operator.models.observed import Object
from support.installed_operator import installed_operator
from support.kube.components import Options
from support.kube.local import LocalCluster, local_cluster
from support.kube.sandbox import NODE_ADDRESS
from support.kubelet import Kubelet
from support.operator_world import NAME, World
from support.release import API_SERVICES, Release, release_of
from support.speculative_deployments import PAIR

METRICS_PORT = 8443
SPEC: dict[str, Any] = {
    **PAIR,
    "target": {"model": {"uri": "hf://org/target", "credentialsSecretRef": {"name": "hub"}}},
    "modelCache": {"persistentVolumeClaim": "cache"},
    "accelerator": {"resourceName": "nvidia.com/gpu"},  # its memory is read from the nodes
    "autoscaling": {"minReplicas": 1, "maxReplicas": 5},
}


class Right(NamedTuple):
    """Without a namespace: in all of them. Without a name: whatever the name."""

    namespace: str
    group: str
    resource: str
    name: str
    verb: str


# The admission of owner references that block their owner's deletion asks for it, where a cluster has that
# switched on; no request is made for it.
BLOCKING_OWNERS = ("draftline.dev", "speculativedeployments/finalizers", "", "update")
# Comes with Kubernetes' own role, of which the first of three verbs is used.
PUBLISHED = ("", "configmaps", "extension-apiserver-authentication")


def never_asked(namespace: str) -> set[Right]:
    return {Right(namespace, *BLOCKING_OWNERS)}


NEVER_ASKED_OF_KUBE_SYSTEM = {Right("kube-system", *PUBLISHED, verb) for verb in ("list", "watch")}


def crd_of_another_project(kind: Kind) -> dict[str, Any]:
    """As much of it as the API server needs to keep such objects."""
    group, _, version = kind.api_version.partition("/")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind.kind, "plural": kind.plural},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }


@pytest.fixture(scope="module")
def bare_cluster(starts_clusters: None) -> Iterator[LocalCluster]:
    """One of its own: kinds of other projects are installed, and the API server reads metrics from us."""
    with local_cluster(Options(node=False)) as cluster:
        crds = [crd_of_another_project(kind) for kind in (SERVICE_MONITOR, SCALED_OBJECT)]
        cluster.apply(*crds)
        for crd in crds:
            cluster.wait("condition=Established", f"crd/{crd['metadata']['name']}")
        yield cluster


@pytest.fixture
def release(bare_cluster: LocalCluster) -> Iterator[Release]:
    with release_of(bare_cluster) as release:
        yield release


@dataclass
class Life:
    """Of a resource, under an operator that is restarted with other settings now and then."""

    cluster: LocalCluster
    release: Release
    world: World
    folder: Path

    @contextlib.asynccontextmanager
    async def operator(self, name: str, **changed: str) -> AsyncIterator[None]:
        """Until it has ended as it should."""
        with installed_operator(
            self.cluster, self.release, self.folder / f"{name}.log", **changed
        ) as process:
            await asyncio.to_thread(process.wait_for, "became the leader")
            yield
            assert await asyncio.to_thread(process.stop) == 0

    async def live(self, other_provider: str) -> None:
        async with self.operator("first"):
            await self._come_up_and_change()
        async with self.operator(
            "second", autoscaling_provider=other_provider, network_policy="false", service_monitor="false"
        ):
            await self._until_there(SCALED_OBJECT)
            await self._until_gone(HORIZONTAL_POD_AUTOSCALER, NETWORK_POLICY, SERVICE_MONITOR)
        where = ("--namespace", self.release.namespace)
        await asyncio.to_thread(self.cluster.kubectl, "delete", "lease", self.release.name, *where)
        async with self.operator("third"):  # which makes a new one
            await self._until_there(HORIZONTAL_POD_AUTOSCALER, NETWORK_POLICY, SERVICE_MONITOR)
            await self._until_gone(SCALED_OBJECT)
            await self.world.client.delete(SPECULATIVE_DEPLOYMENT, self.world.namespace, NAME)
            await self._until_gone(DEPLOYMENT, HORIZONTAL_POD_AUTOSCALER)

    async def _come_up_and_change(self) -> None:
        world = self.world
        self.put_secret("first")
        await world.create(copy.deepcopy(SPEC))
        await self._until_ready(pods=1)
        await world.scale(3)
        await self._until_ready(pods=3)
        await world.scale(1)
        await self._until_ready(pods=1)
        await world.change({"serving": {"maxQueueLength": 9}})
        await world.until(self._has_one_configuration, seconds=60)
        template = (await world.existing(DEPLOYMENT))["spec"]["template"]
        self.put_secret("second")
        note = {"metadata": {"annotations": {"example.com/note": "the Secret is another one"}}}
        await world.client.patch(SPECULATIVE_DEPLOYMENT, world.namespace, NAME, note)

        async def has_rolled() -> bool:
            return bool((await world.existing(DEPLOYMENT))["spec"]["template"] != template)

        await world.until(has_rolled, seconds=30)
        await self._until_ready(pods=1)

    def put_secret(self, value: str) -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "hub"},
            "stringData": {"HF_TOKEN": value},
        }
        self.cluster.apply(secret, namespace=self.world.namespace)

    async def _until_ready(self, *, pods: int) -> None:
        async def is_ready() -> bool:
            body = await self.world.existing(SPECULATIVE_DEPLOYMENT)
            status = body.get("status") or {}
            conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
            is_current = status.get("observedGeneration") == body["metadata"]["generation"]
            at_rest = (conditions.get("Ready"), conditions.get("Progressing")) == ("True", "False")
            return is_current and at_rest and len(await self.world.pods()) == pods

        await self.world.until(is_ready, seconds=60)

    async def _has_one_configuration(self) -> bool:
        found = await self.world.client.list(CONFIG_MAP, self.world.namespace)
        return len([c for c in found if c["metadata"]["name"].startswith(f"{NAME}-config-")]) == 1

    async def _until_there(self, *kinds: Kind) -> None:
        async def are_there() -> bool:
            return None not in await self._all(kinds)

        await self.world.until(are_there, seconds=30)

    async def _until_gone(self, *kinds: Kind) -> None:
        async def are_gone() -> bool:
            return not any(await self._all(kinds))

        await self.world.until(are_gone, seconds=60)

    async def _all(self, kinds: tuple[Kind, ...]) -> list[Object | None]:
        return [await self.world.get(kind) for kind in kinds]


@pytest.fixture
async def life(bare_cluster: LocalCluster, release: Release, tmp_path: Path) -> AsyncIterator[Life]:
    """With a kubelet that runs all the time."""
    namespace = f"test-{secrets.token_hex(4)}"
    bare_cluster.kubectl("create", "namespace", namespace)
    async with ClusterClient(await load_configuration(str(bare_cluster.kubeconfig))) as client:
        world = World(client, namespace, Kubelet(client, namespace))
        async with world.kubelet.running():
            yield Life(bare_cluster, release, world, tmp_path)
    bare_cluster.kubectl("delete", "namespace", namespace, "--wait=false")


async def test_in_cluster_scope_it_asks_for_all_that_it_may_and_nothing_else(life: Life) -> None:
    cluster, release = life.cluster, life.release
    release.install({"autoscaling": {"provider": "builtin", "metricsApi": {"port": METRICS_PORT}}})
    release.lead_metrics_api_to(NODE_ADDRESS, METRICS_PORT)
    rights = rights_of(release)
    task = asyncio.create_task(life.live(other_provider="keda"))
    try:
        await asyncio.to_thread(read_a_metric, cluster, life.world.namespace)
    finally:
        await task
    with installed_operator(cluster, release, life.folder / "hook", "unregister-metrics-api") as hook:
        assert await asyncio.to_thread(hook.process.wait, 30) == 0
    assert not set(API_SERVICES) & {a["metadata"]["name"] for a in cluster.get("apiservices")["items"]}
    assert_equal_to_requests(rights, requests_of(release), never_asked("") | NEVER_ASKED_OF_KUBE_SYSTEM)


async def test_in_namespaced_scope_it_asks_for_all_that_it_may_and_nothing_else(life: Life) -> None:
    namespace = life.world.namespace
    life.release.install(
        {
            "scope": "namespaced",
            "watchNamespaces": [namespace],
            "autoscaling": {"provider": "prometheus-adapter"},
        }
    )
    rights = rights_of(life.release)
    await life.live(other_provider="keda")
    assert_equal_to_requests(rights, requests_of(life.release), never_asked(namespace))


def read_a_metric(cluster: LocalCluster, namespace: str) -> None:
    """As the autoscaler does; that nobody knows the load is told only to those who may know it."""
    for name in API_SERVICES:
        cluster.wait("condition=Available", f"apiservice/{name}", seconds=60)
    resource = f"namespaces/{namespace}/speculativedeployments.draftline.dev/{NAME}"
    path = f"/apis/custom.metrics.k8s.io/v1beta2/{resource}/draftline_requests_waiting"
    assert "there is no draftline_requests_waiting" in cluster.try_kubectl("get", "--raw", path).stderr


def assert_equal_to_requests(rights: set[Right], requests: list[Right], never_asked: set[Right]) -> None:
    covering = {request: {right for right in rights if covers(right, request)} for request in requests}
    assert [request for request, found in covering.items() if not found] == [], "asked without a right"
    used = set().union(*covering.values())
    assert rights - used == never_asked, "rights that nothing needs"


def covers(right: Right, request: Right) -> bool:
    return (
        right.namespace in ("", request.namespace)
        and right.name in ("", request.name)
        and (right.group, right.resource, right.verb) == (request.group, request.resource, request.verb)
    )


def rights_of(release: Release) -> set[Right]:
    """Of the operator's ServiceAccount, as the API server knows them."""
    found = release.cluster.get("clusterrolebindings,rolebindings", "--all-namespaces")["items"]
    account = {"kind": "ServiceAccount", "name": release.name, "namespace": release.namespace}
    rights: set[Right] = set()
    for binding in found:
        if account not in binding.get("subjects", ()):
            continue
        namespace, role = binding["metadata"].get("namespace", ""), binding["roleRef"]
        place = ("--namespace", namespace) if role["kind"] == "Role" else ()
        for rule in release.cluster.get(role["kind"].lower(), role["name"], *place)["rules"]:
            rights |= {
                Right(namespace, group, resource, name, verb)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for name in rule.get("resourceNames", ("",))
                for verb in rule["verbs"]
            }
    assert rights
    return rights


def requests_of(release: Release) -> list[Right]:
    """Of the operator, by the audit log; to apply what does not exist takes the right to create, too."""
    assert isinstance(release.cluster, LocalCluster)
    user = f"system:serviceaccount:{release.namespace}:{release.name}"
    events = map(json.loads, release.cluster.audit_log.read_text().splitlines())
    ours = [event for event in events if event["user"]["username"] == user]
    refused = [event["requestURI"] for event in ours if event["responseStatus"]["code"] == 403]
    assert refused == []
    requests: dict[Right, None] = {}
    for event in ours:
        if (what := event.get("objectRef")) is None:  # discovery, and the server's version
            continue
        resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
        is_new = event["verb"] == "patch" and event["responseStatus"]["code"] == 201
        for verb in ("patch", "create") if is_new else (event["verb"],):
            name = "" if verb == "create" else what.get("name", "")
            place = (what.get("namespace", ""), what.get("apiGroup", ""))
            requests[Right(*place, resource, name, verb)] = None
    return list(requests)
