"""An API server and its controllers without a node, for what concerns the operator alone."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from draftline_operator.cluster.client import ClusterClient, load_configuration
from support.kept_logs import recorded_cluster
from support.kube.cluster import Cluster
from support.kube.components import Options
from support.kube.local import LocalCluster
from support.kubelet import Kubelet
from support.operator_world import World
from support.operators import Operators

CRD = Path(__file__).parents[3] / "crds" / "speculativedeployments.yaml"


@pytest.fixture(scope="session")
def control_plane(named_cluster: Cluster | None, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """With the CRD. A named cluster is taken where it has no nodes: here the tests play the kubelet."""
    if named_cluster is None:
        with recorded_cluster(request.session, Options(node=False)) as started:
            install_crd(started)
            yield started
        return
    if named_cluster.get("nodes")["items"]:
        pytest.skip("needs a control plane without nodes, and the cluster that is named has some")
    install_crd(named_cluster)
    yield named_cluster


def install_crd(cluster: Cluster) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={CRD}")
    cluster.kubectl("wait", "--for=condition=Established", f"--filename={CRD}", "--timeout=30s")


@pytest.fixture(scope="session")
def local_control_plane(control_plane: Cluster) -> LocalCluster:
    """The same, for tests of what only a local one can do: other users, the audit log, crashes."""
    if not isinstance(control_plane, LocalCluster):
        pytest.skip("needs a local cluster")
    return control_plane


def namespace_of(cluster: Cluster) -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


@pytest.fixture
def control_plane_namespace(control_plane: Cluster) -> Iterator[str]:
    yield from namespace_of(control_plane)


@pytest.fixture
async def client(control_plane: Cluster) -> AsyncIterator[ClusterClient]:
    """The operator's own, as the cluster's administrator."""
    async with ClusterClient(await load_configuration(str(control_plane.kubeconfig))) as opened:
        yield opened


@pytest.fixture
async def world(client: ClusterClient, control_plane_namespace: str) -> World:
    return World(client, control_plane_namespace, Kubelet(client, control_plane_namespace))


@pytest.fixture
def twin_namespace(control_plane: Cluster) -> Iterator[str]:
    yield from namespace_of(control_plane)


@pytest.fixture
async def twin(client: ClusterClient, twin_namespace: str) -> World:
    """Another namespace, to show what would have come of it without the trouble."""
    return World(client, twin_namespace, Kubelet(client, twin_namespace))


@pytest.fixture
async def kubelet_runs(world: World) -> AsyncIterator[None]:
    """All the time, beside the operator."""
    async with world.kubelet.running():
        yield


@pytest.fixture
def operators(local_control_plane: LocalCluster, world: World, tmp_path: Path) -> Operators:
    return Operators(local_control_plane, world, tmp_path)
