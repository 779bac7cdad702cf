"""However a cluster ends, nothing of it stays; and two of them at once know nothing of each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.kube.cache import ROOT
from support.kube.cluster import Cluster
from support.kube.components import Options
from support.kube.control_groups import control_groups_of
from support.kube.local import LocalCluster
from support.kube.local import local_cluster as started_cluster
from support.kube.sandbox import CLUSTERS, INIT_PID, Sandbox
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("starts_clusters")]

KINDS = ("net", "mnt", "pid")


def namespaces_of(pid: int | str) -> dict[str, str]:
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}


def processes_in(namespaces: dict[str, str]) -> list[str]:
    """Of every process that is in one of these namespaces: what it is called."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if set(namespaces.values()) & set(namespaces_of(process.name).values()):
                found.append((process / "comm").read_text().strip())
        except OSError:
            continue  # it has just ended
    return found


def assert_nothing_is_left(name: str, namespaces: dict[str, str]) -> None:
    # A namespace that no process is in and no mount holds does not exist.
    assert processes_in(namespaces) == []
    assert name not in Path("/proc/self/mounts").read_text()
    assert not [line for line in Path("/proc/self/mounts").read_text().splitlines() if " nsfs " in line]
    assert control_groups_of(name) == []
    assert not (CLUSTERS / name).exists()


@contextmanager
def persons_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Python, as somebody has started it from a shell."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def persons_cluster() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One that somebody has started from a shell: the process and the cluster's name."""
    with persons_process("-m", "support.kube", "up", "--control-plane-only") as process:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        assert first_line.startswith("The cluster draftline-"), first_line
        yield process, first_line.split()[2]


def init_of(name: str) -> int:
    return int((CLUSTERS / name / INIT_PID).read_text())


def test_a_stopped_cluster_leaves_nothing(namespace: str, cluster: Cluster) -> None:
    with started_cluster() as second:
        name, namespaces = second.sandbox.name, namespaces_of(second.sandbox.init_pid)
        assert {"kube-apiserver", "kubelet", "containerd"} <= set(processes_in(namespaces))
        assert control_groups_of(name)
        assert not set(namespaces.values()) & set(namespaces_of("self").values())
    assert_nothing_is_left(name, namespaces)


def test_two_clusters_at_once_do_not_meet(local_cluster: LocalCluster, namespace: str) -> None:
    with started_cluster() as second:
        assert second.try_kubectl("get", "namespace", namespace).returncode != 0
        assert second.server != local_cluster.server
        for cluster in (local_cluster, second):
            cluster.wait("condition=Ready", "node", "--all")
        of_both = [namespaces_of(cluster.sandbox.init_pid) for cluster in (local_cluster, second)]
        assert not set(of_both[0].values()) & set(of_both[1].values())
    local_cluster.wait("condition=Ready", "node", "--all")
    local_cluster.kubectl("get", "namespace", namespace)


def test_an_interrupt_stops_everything() -> None:
    with persons_cluster() as (process, name):
        namespaces = namespaces_of(init_of(name))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=60) == 130
        assert_nothing_is_left(name, namespaces)


def test_what_a_killed_run_left_is_removed_at_the_next_start() -> None:
    with persons_cluster() as (process, name):
        namespaces = namespaces_of(init_of(name))
        process.kill()
        wait_until(lambda: not processes_in(namespaces))  # the kernel sees to that
        assert control_groups_of(name)
        assert (CLUSTERS / name).exists()
        Sandbox().stop()
        assert_nothing_is_left(name, namespaces)


def test_a_client_that_has_only_the_network_does_not_outlive_who_started_it() -> None:
    owner = """
import subprocess
from support.kube.sandbox import Sandbox
sandbox = Sandbox()
client = subprocess.Popen(sandbox.command("sleep", "600", only_network=True))
print(sandbox.init_pid, flush=True)
client.wait()
"""
    with persons_process("-c", owner) as process:
        assert process.stdout is not None
        namespaces = namespaces_of(process.stdout.readline().strip())
        wait_until(lambda: "sleep" in processes_in(namespaces))
        process.kill()
        wait_until(lambda: not processes_in(namespaces))
    Sandbox().stop()


def test_the_control_plane_alone_survives_the_crash_of_its_api_server() -> None:
    with started_cluster(Options(node=False)) as cluster:
        cluster.kubectl("create", "configmap", "kept", "--from-literal=key=value")
        cluster.kill("kube-apiserver")
        with pytest.raises(OSError, match=r"closed|reset|EOF"):
            cluster.request("GET", "/readyz")
        cluster.start("kube-apiserver")
        assert cluster.get("configmap", "kept")["data"] == {"key": "value"}
