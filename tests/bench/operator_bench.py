"""What the operator costs and how fast it is with many resources, as a markdown table.

``make bench-operator`` runs it, as root on Linux: a control plane of its own, without nodes, whose autoscaler
looks as often as it does by default. The pods are faked: their statuses say that they are ready, and one
process answers for all of them when they are asked for their load. All resources serve one pair, which is
checked once. Times are those of the API server's audit log: from the user's request until the operator's last
write of a child for that change. It fails where a request was followed by no such write, or where the pair
was checked more than once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kubernetes_asyncio.client import ApiClient, CoreV1Api

from draftline_operator.cluster.client import ClusterClient, load_configuration
from draftline_operator.constants import ADMIN_PORT, API_VERSION, KIND
from draftline_operator.errors import ClusterError
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT
from draftline_operator.models.observed import Object
from support import answering_pods
from support.audit_log import read_requests
from support.kube.components import Options
from support.kube.local import LocalCluster, local_cluster
from support.kube.sandbox import NODE_ADDRESS
from support.kubelet import Kubelet
from support.operator_phases import OPERATOR, Phase, delays_of, faults_of, preflights_in, render
from support.speculative_deployments import PAIR

CRD = Path(__file__).resolve().parents[2] / "crds" / "speculativedeployments.yaml"
NAMESPACE = "bench"
HEALTH_PORT = 8080
HPA_SYNC_SECONDS = 15.0
SPEC: dict[str, Any] = {**PAIR, "replicas": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """Of the operator's process, up to a moment."""

    at: float
    cpu_seconds: float
    machine_seconds: float
    """Of all processes together."""
    resident_mib: float
    reconciles: int


@dataclass
class Bench:
    cluster: LocalCluster
    client: ClusterClient
    operator_pid: int
    health_port: int
    names: Sequence[str]

    async def create(self) -> None:
        for name in self.names:
            metadata = {"name": name, "namespace": NAMESPACE}
            await self.client.create(
                {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": SPEC}
            )

    async def change_all(self, queue_length: int, *, every: float) -> None:
        """Each resource gets another configuration, and so new pods."""
        change = {"spec": {"serving": {"maxQueueLength": queue_length}}}
        for name in self.names:
            began = time.monotonic()
            await self.client.patch(SPECULATIVE_DEPLOYMENT, NAMESPACE, name, change)
            await asyncio.sleep(max(0.0, every - (time.monotonic() - began)))

    async def settle(self, seconds: float = 600) -> None:
        """Until all are ready in their present generation."""
        deadline = time.monotonic() + seconds
        while True:
            bodies = await self.client.list(SPECULATIVE_DEPLOYMENT, NAMESPACE)
            if len(bodies) == len(self.names) and all(map(is_at_rest, bodies)):
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"{sum(map(is_at_rest, bodies))} of {len(self.names)} came to rest")
            await asyncio.sleep(1)

    def cost(self) -> Cost:
        fields = Path(f"/proc/{self.operator_pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{self.operator_pid}/status").read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert resident is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/metrics", timeout=5) as answer:
            page = answer.read().decode()
        return Cost(
            at=time.time(),
            machine_seconds=_busy_seconds(),
            cpu_seconds=(int(fields[11]) + int(fields[12])) / TICKS,
            resident_mib=int(resident[1]) / 1024,
            reconciles=sum(
                int(float(line.rsplit(" ", 1)[1]))
                for line in page.splitlines()
                if line.startswith("draftline_operator_reconciles_total")
            ),
        )

    def phase(self, name: str, before: Cost) -> Phase:
        after = self.cost()
        print(f"done: {name}", file=sys.stderr)
        log = [r for r in read_requests(self.cluster.audit_log) if before.at <= r.began <= after.at]
        ours = [r for r in log if r.user == OPERATOR]
        beside = [r for r in ours if r.verb == "watch" or r.resource in ("leases", "")]
        return Phase(
            name=name,
            seconds=after.at - before.at,
            cpu_seconds=after.cpu_seconds - before.cpu_seconds,
            machine_seconds=after.machine_seconds - before.machine_seconds,
            resident_mib=after.resident_mib,
            reconciles=after.reconciles - before.reconciles,
            requests=len(ours) - len(beside),
            watches_and_leases=len(beside),
            delays=delays_of(log),
            preflights=preflights_in(log),
        )


def _busy_seconds() -> float:
    user, nice, system, _idle, _iowait, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / TICKS


@dataclass(slots=True, kw_only=True)
class ThriftyKubelet(Kubelet):
    """Asks only for pods that wait for it: reading all of them would be most of what the API server does."""

    api: CoreV1Api

    async def _pods(self) -> list[Object]:
        pending: Any = await self.api.list_namespaced_pod(
            self.namespace, field_selector="status.phase=Pending", _preload_content=False
        )
        items: list[Object] = json.loads(await pending.read())["items"]
        return items


def is_at_rest(body: dict[str, Any]) -> bool:
    status = body.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    is_current = status.get("observedGeneration") == body["metadata"]["generation"]
    return is_current and (conditions.get("Ready"), conditions.get("Progressing")) == ("True", "False")


async def measure(cluster: LocalCluster, number: int, every: float, rest_seconds: float) -> list[Phase]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(_inside(cluster, Path(folder, "pods.log"), *_pods_command()))
        kubeconfig = cluster.kubeconfig_for(OPERATOR, ["system:masters"], inside=True)
        operator = stack.enter_context(
            _inside(cluster, Path(folder, "operator.log"), *_operator_command(kubeconfig))
        )
        configuration = await load_configuration(str(cluster.kubeconfig))
        async with ClusterClient(configuration, timeout=30) as client, ApiClient(configuration) as api:
            bench = Bench(
                cluster=cluster,
                client=client,
                operator_pid=operator.pid,
                health_port=cluster.forward(NODE_ADDRESS, HEALTH_PORT),
                names=[f"chat-{index}" for index in range(number)],
            )
            await _until_ready(bench.health_port)
            kubelet = ThriftyKubelet(client, NAMESPACE, api=CoreV1Api(api))
            stepping = asyncio.create_task(_step_for_ever(kubelet))
            phases = await _phases(bench, every, rest_seconds)
            stepping.cancel()
            return phases


async def _phases(bench: Bench, every: float, rest_seconds: float) -> list[Phase]:
    number = len(bench.names)
    before = bench.cost()
    await bench.create()
    await bench.settle()
    phases = [bench.phase(f"{number} resources created at once", before)]

    before = bench.cost()
    await bench.change_all(9, every=every)
    await bench.settle()
    phases.append(bench.phase(f"each changed, one every {every:g} s", before))

    before = bench.cost()
    await bench.change_all(10, every=0)
    await bench.settle()
    phases.append(bench.phase("all changed at once", before))

    before = bench.cost()
    await asyncio.sleep(rest_seconds)
    phases.append(bench.phase(f"{rest_seconds:g} s at rest", before))
    return phases


def _pods_command() -> list[str]:
    return [sys.executable, answering_pods.__file__, "127.0.0.1", str(ADMIN_PORT)]


def _operator_command(kubeconfig: Path) -> list[str]:
    flags = {
        "kubeconfig": kubeconfig,
        "autoscaling-provider": "builtin",
        "health-host": NODE_ADDRESS,
        "health-port": HEALTH_PORT,
        "default-image": "registry.test/server:1",
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "draftline_operator.main", "run", *arguments]


@contextlib.contextmanager
def _inside(cluster: LocalCluster, log_file: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the cluster's network, where the pods' addresses are."""
    with log_file.open("wb") as log:
        process = subprocess.Popen(cluster.command_inside(*command), stdout=log, stderr=log)
    try:
        yield process
        if (code := process.poll()) is not None:
            raise SystemExit(f"{command[1]} ended with {code}:\n{log_file.read_text()[-2000:]}")
    finally:
        process.terminate()
        process.wait(timeout=20)


async def _until_ready(port: int) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError):
            page = await asyncio.to_thread(
                lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
            )
            if b"draftline_operator_leader 1.0" in page:
                return
        await asyncio.sleep(0.2)
    raise SystemExit("the operator does not become the leader")


async def _step_for_ever(kubelet: Kubelet) -> None:
    while True:
        with contextlib.suppress(ClusterError):
            await kubelet.step()
        await asyncio.sleep(0.5)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="operator_bench", description="Measures the operator.")
    parser.add_argument("--resources", type=int, default=200)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between single changes")
    parser.add_argument("--rest", type=float, default=60, help="seconds to measure at rest")
    arguments = parser.parse_args(argv)
    with local_cluster(Options(node=False, hpa_sync_seconds=HPA_SYNC_SECONDS)) as cluster:
        cluster.kubectl("apply", "--server-side", f"--filename={CRD}")
        cluster.kubectl("wait", "--for=condition=Established", f"--filename={CRD}", "--timeout=30s")
        cluster.kubectl("create", "namespace", NAMESPACE)
        phases = asyncio.run(measure(cluster, arguments.resources, arguments.every, arguments.rest))
    print(
        f"One operator, {arguments.resources} resources of one pair, {os.cpu_count()} cores shared with the"
    )
    print("API server and everything else. Times: from a change to the last of its children applied.")
    print(f"Preflight Jobs: {sum(phase.preflights for phase in phases)}.\n")
    print(render(phases))
    faults = faults_of(phases)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
