"""An API server and its controllers without a node, for what concerns the operator alone."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from draftline_operator.cluster.client import ClusterClient, load_configuration
from support.kube.components import Options
from support.kube.local import LocalCluster, local_cluster
from support.kubelet import Kubelet
from support.operator_world import World

CRD = Path(__file__).parents[3] / "crds" / "speculativedeployments.yaml"


@pytest.fixture(scope="session")
def control_plane(needs_cluster: None) -> Iterator[LocalCluster]:
    """With the CRD."""
    with local_cluster(Options(node=False)) as cluster:
        cluster.kubectl("apply", "--server-side", f"--filename={CRD}")
        cluster.kubectl("wait", "--for=condition=Established", f"--filename={CRD}", "--timeout=30s")
        yield cluster


@pytest.fixture
def control_plane_namespace(control_plane: LocalCluster) -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


@pytest.fixture
async def client(control_plane: LocalCluster) -> AsyncIterator[ClusterClient]:
    """The operator's own, as the cluster's administrator."""
    async with ClusterClient(await load_configuration(str(control_plane.kubeconfig))) as opened:
        yield opened


@pytest.fixture
async def world(client: ClusterClient, control_plane_namespace: str) -> World:
    return World(client, control_plane_namespace, Kubelet(client, control_plane_namespace))
