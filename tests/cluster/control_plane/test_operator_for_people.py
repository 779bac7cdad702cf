"""What a person does with helm and kubectl alone, as the README has it, from the installation to its end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftline_operator.constants import ADMIN_PORT
from support import answering_pods
from support.helm import ROOT
from support.installed_operator import installed_operator
from support.kube.cluster import Cluster
from support.kube.local import LocalCluster
from support.made_objects import is_empty
from support.operator_world import World
from support.release import CRD, release_of

SAMPLE = ROOT / "crds" / "examples" / "cpu.yaml"
COLUMNS = {
    "NAME": "chat",
    "TARGET": "pvc://models/smollm2-1.7b-instruct",
    "DRAFT": "pvc://models/smollm2-135m-instruct",
    "READY": "True",
    "REPLICAS": "1",
    "ACCEPTANCE": str(answering_pods.ACCEPTANCE),
    "QUEUE": "0",
}
NOBODYS = {"events", "events.events.k8s.io", "componentstatuses"}
"""Kinds that come and go by themselves."""


@pytest.fixture
def pods_answer(local_control_plane: LocalCluster) -> Iterator[None]:
    """When they are asked for their load, all at one address of the cluster's own network."""
    command = [sys.executable, answering_pods.__file__, "127.0.0.1", str(ADMIN_PORT)]
    with subprocess.Popen(local_control_plane.command_inside(*command)) as process:
        yield
        process.terminate()


def objects_of(cluster: Cluster) -> set[str]:
    """Everything that there is, by kind, namespace and name."""
    kinds = set(cluster.kubectl("api-resources", "--verbs=list", "--output=name").split()) - NOBODYS
    line = '{range .items[*]}{.kind}/{.metadata.namespace}/{.metadata.name}{"\\n"}{end}'
    shown = cluster.kubectl("get", ",".join(sorted(kinds)), "--all-namespaces", f"--output=jsonpath={line}")
    return set(shown.split())


def row_of(table: str) -> dict[str, str]:
    """Of one object, by column."""
    header, row = (line.split() for line in table.splitlines())
    return dict(zip(header, row, strict=True))


@pytest.mark.usefixtures("kubelet_runs", "pods_answer")
async def test_from_the_installation_to_its_end(
    world: World, local_control_plane: LocalCluster, tmp_path: Path
) -> None:
    cluster = local_control_plane
    with release_of(cluster) as release:
        for namespace in (release.namespace, world.namespace):
            for own in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
                cluster.kubectl("wait", "--for=create", own, "--namespace", namespace, "--timeout=30s")
        before = objects_of(cluster)
        release.install({"autoscaling": {"provider": "none"}})
        with installed_operator(
            cluster, release, tmp_path / "log", figures_seconds="1", scrape_seconds="1"
        ) as operator:
            await asyncio.to_thread(use_the_sample, cluster, world.namespace)
            await world.until(lambda: is_empty(world), seconds=30)
            assert await asyncio.to_thread(operator.stop) == 0
        assert objects_of(cluster) - before, "there is something to be uninstalled"
        await asyncio.to_thread(release.uninstall)
        await world.until(lambda: nothing_is_left(cluster, before), seconds=30)
    assert cluster.get("crd", CRD)["metadata"]["name"] == CRD


async def nothing_is_left(cluster: Cluster, before: set[str]) -> bool:
    left = await asyncio.to_thread(objects_of, cluster) - before
    print(left)
    return not left


def use_the_sample(cluster: Cluster, namespace: str) -> None:
    def kubectl(*arguments: str) -> str:
        return cluster.kubectl(*arguments, "--namespace", namespace)

    kubectl("apply", f"--filename={SAMPLE}")
    kubectl("wait", "--for=condition=Ready", "specdep/chat", "--timeout=60s")
    kubectl("wait", "--for=jsonpath={.status.acceptanceRate}", "specdep/chat", "--timeout=60s")
    row = row_of(kubectl("get", "specdep", "chat"))
    assert row.pop("AGE")
    assert row == COLUMNS
    wide = row_of(kubectl("get", "specdep", "chat", "--output=wide"))
    assert (wide["REASON"], wide["DESIRED"], wide["SPECULATION"]) == ("PodsAvailable", "1", "Active")
    kubectl("scale", "specdep/chat", "--replicas=3")
    kubectl("wait", "--for=jsonpath={.status.readyReplicas}=3", "specdep/chat", "--timeout=60s")
    assert row_of(kubectl("get", "specdep", "chat"))["REPLICAS"] == "3"
    assert "PodsAvailable" in kubectl("describe", "specdep", "chat")
    assert "chat" in kubectl("get", "draftline", "--output=name"), "the category"
    kubectl("delete", f"--filename={SAMPLE}", "--timeout=30s")
