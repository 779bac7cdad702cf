"""A whole Kubernetes on this machine, in namespaces of its own: control plane, one node, DNS.

Pods and Services have addresses that exist inside only. What has to reach them runs as a pod, or inside
(`command_inside`, `run_inside`), or through `forward`.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.kube import binaries, components, host
from support.kube.certificates import Authority
from support.kube.cluster import Cluster
from support.kube.components import INSIDE_SERVER, NODE_NAME, Layout, Options
from support.kube.errors import ClusterFailed
from support.kube.host import Say, say_on_stderr
from support.kube.images import ensure_pause_image, import_image
from support.kube.sandbox import NODE_ADDRESS, Component, Sandbox

START_SECONDS = 120.0


@dataclass(frozen=True)
class LocalCluster(Cluster):
    """A running one. `start_local_cluster` makes it."""

    sandbox: Sandbox
    layout: Layout
    authority: Authority
    server: str
    components: dict[str, Component]

    @property
    def logs(self) -> Path:
        """Of the components."""
        return self.layout.logs

    @property
    def pod_logs(self) -> Path:
        """Of the pods' containers, as the kubelet keeps them."""
        return self.layout.directory / "var-log" / "pods"

    @property
    def audit_log(self) -> Path:
        """Every request to the API server, a JSON document a line."""
        return self.layout.audit_log

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> Any:
        """The answer of the API server to its administrator; `urllib.error.HTTPError` where it refuses."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type}
        request = urllib.request.Request(self.server + path, data=data, method=method, headers=headers)
        context = ssl.create_default_context(cafile=self.authority.certificate)
        context.load_cert_chain(self.layout.pki / "admin.crt", self.layout.pki / "admin.key")
        with urllib.request.urlopen(request, context=context, timeout=30) as response:
            content = response.read().decode()
        return json.loads(content) if content.startswith("{") else content

    def load_image(self, archive: Path) -> None:
        """Brings the image of an archive to the node."""
        import_image(self.sandbox.command, archive)

    def forward(self, address: str, port: int) -> int:
        """A port on the host's loopback that leads to a pod or a Service."""
        return self.sandbox.forward(address, port)

    def run_inside(self, *arguments: str, **options: Any) -> str:
        """Runs a command on the node, and returns what it prints."""
        return self.sandbox.run(*arguments, **options)

    def command_inside(self, *arguments: str) -> list[str]:
        """The command line of a process with the node's network, and the rest of who starts it."""
        return self.sandbox.command(*arguments, only_network=True)

    def kubeconfig_for(self, user: str, groups: Sequence[str] = (), *, inside: bool = False) -> Path:
        """A kubeconfig of another user, who may do what RBAC grants; for use on the host or inside."""
        file = user.replace(":", "-").replace("/", "-")
        self.authority.issue(file, user, groups)
        kubeconfig = self.layout.kubeconfig(f"{file}-inside" if inside else file)
        kubeconfig.write_text(self.authority.kubeconfig(file, INSIDE_SERVER if inside else self.server))
        return kubeconfig

    def kill(self, component: str) -> None:
        """Ends a component as a crash would."""
        self.components[component].kill()

    def start(self, component: str) -> None:
        """Starts a component again; after the API server's start, waits until it is ready."""
        self.components[component] = self.sandbox.start(component, *self.components[component].arguments)
        if component == "kube-apiserver":
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Returns when the API server answers that it is."""
        self._wait_for("the API server", lambda: self.request("GET", "/readyz") == "ok")

    def stop(self) -> None:
        """Ends everything and removes it."""
        self.sandbox.stop()

    def _wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        give_up = time.monotonic() + START_SECONDS
        while True:
            for component in self.components.values():
                component.fail_if_ended()
            try:
                if holds():
                    return
            except OSError:  # of which urllib's errors are some: nobody listens yet, or it is not there yet
                pass
            if time.monotonic() > give_up:
                raise ClusterFailed(f"{what} not ready after {START_SECONDS:.0f} s, logs in {self.logs}")
            time.sleep(0.1)

    def _node_is_ready(self) -> bool:
        node = self.request("GET", f"/api/v1/nodes/{NODE_NAME}")
        return any(
            c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", [])
        )


@contextmanager
def local_cluster(options: Options | None = None, say: Say = say_on_stderr) -> Iterator[LocalCluster]:
    """A cluster for as long as the block lasts."""
    cluster = start_local_cluster(options, say)
    try:
        yield cluster
    finally:
        cluster.stop()


def ensure_prepared(options: Options, say: Say) -> dict[str, Path]:
    """Whatever takes minutes, once on a machine: packages, binaries. Returns where the programs are."""
    host.require_root()
    host.ensure_programs(host.CONTROL_PLANE, say)
    if options.node:
        host.ensure_programs({**host.NODE, **host.IMAGES}, say)
        ensure_pause_image()
    return binaries.ensure_binaries((*binaries.CONTROL_PLANE, *(binaries.NODE if options.node else ())), say)


def start_local_cluster(options: Options | None = None, say: Say = say_on_stderr) -> LocalCluster:
    """Starts a cluster that is ready to be used. Whoever calls this has to stop it."""
    options = options or Options()
    programs = ensure_prepared(options, say)
    sandbox = Sandbox()
    try:
        layout = Layout(sandbox.directory)
        authority = Authority(layout.pki)
        server = f"https://127.0.0.1:{sandbox.forward(NODE_ADDRESS, components.API_PORT)}"
        _write_files(layout, authority, server, sandbox.name)
        cluster = LocalCluster(
            kubeconfig=layout.kubeconfig("admin"),
            kubectl_path=programs["kubectl"],
            sandbox=sandbox,
            layout=layout,
            authority=authority,
            server=server,
            components={},
        )
        _start_components(cluster, programs, options)
    except BaseException:
        sandbox.stop()
        raise
    return cluster


def _write_files(layout: Layout, authority: Authority, server: str, cgroup: str) -> None:
    authority.found()
    authority.issue("apiserver", "kube-apiserver", names=components.API_SERVER_NAMES)
    for file, (user, groups) in components.IDENTITIES.items():
        authority.issue(file, user, groups, names=components.KUBELET_NAMES if file == "kubelet" else ())
        layout.kubeconfig(file).write_text(
            authority.kubeconfig(file, server if file == "admin" else INSIDE_SERVER)
        )
    for name, text in components.configurations(layout, cgroup).items():
        file_path = layout.configuration(name)
        file_path.parent.mkdir(parents=True, exist_ok=True)
        file_path.write_text(text)


def _start_components(cluster: LocalCluster, programs: dict[str, Path], options: Options) -> None:
    layout = cluster.layout

    def start(name: str, arguments: list[str]) -> None:
        program = str(programs.get(name, name))
        cluster.components[name] = cluster.sandbox.start(name, program, *arguments)

    start("etcd", components.etcd(layout))
    start("kube-apiserver", components.kube_apiserver(layout))
    if options.node:
        start("containerd", components.containerd(layout))
    cluster.wait_until_ready()
    # Not earlier: their RBAC is not there before, and they give up.
    start("kube-controller-manager", components.kube_controller_manager(layout, options))
    start("kube-scheduler", components.kube_scheduler(layout))
    if options.node:
        _wait_for_containerd(cluster)
        cluster.load_image(ensure_pause_image())
        start("kubelet", components.kubelet(layout))
        start("kube-proxy", components.kube_proxy(layout))
        cluster.apply(*components.DNS_MANIFESTS, namespace="kube-system")
        start("coredns", components.coredns(layout))
        cluster._wait_for("the node", cluster._node_is_ready)
        _give_node_gpus(cluster, options.gpus)
    cluster._wait_for("the default service account", lambda: bool(cluster.request("GET", DEFAULT_ACCOUNT)))


DEFAULT_ACCOUNT = "/api/v1/namespaces/default/serviceaccounts/default"


def _wait_for_containerd(cluster: LocalCluster) -> None:
    def answers() -> bool:
        try:
            cluster.run_inside("ctr", "--address", components.CONTAINERD_SOCKET, "version")
        except ClusterFailed:
            return False
        return True

    cluster._wait_for("containerd", answers)


def _give_node_gpus(cluster: LocalCluster, number: int) -> None:
    """Extended resources are whatever the node's status says."""
    changes = [
        {"op": "add", "path": f"/status/{field}/nvidia.com~1gpu", "value": str(number)}
        for field in ("capacity", "allocatable")
    ]
    path = f"/api/v1/nodes/{NODE_NAME}/status"
    cluster.request("PATCH", path, changes, content_type="application/json-patch+json")
