"""How the components are called, and what they are told in files: pure functions of a cluster's directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.kube.sandbox import NODE_ADDRESS

API_PORT = 6443
INSIDE_SERVER = f"https://{NODE_ADDRESS}:{API_PORT}"
NODE_NAME = "node1"
DOMAIN = "cluster.local"
SERVICE_RANGE, API_SERVICE, DNS_SERVICE = "10.96.0.0/16", "10.96.0.1", "10.96.0.10"
POD_RANGE = "10.244.0.0/16"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"


@dataclass(frozen=True)
class Options:
    """What may be different from one cluster to the next."""

    hpa_sync_seconds: float = 2.0
    hpa_downscale_stabilization_seconds: float = 5.0
    gpus: int = 8
    node: bool = True
    """Without a node there is the control plane alone, and pods stay pending."""


@dataclass(frozen=True)
class Layout:
    """Where things are in the directory of a cluster."""

    directory: Path

    @property
    def pki(self) -> Path:
        return self.directory / "pki"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def audit_log(self) -> Path:
        return self.logs / "audit.log"

    def kubeconfig(self, user: str) -> Path:
        return self.directory / f"{user}.kubeconfig"

    def configuration(self, name: str) -> Path:
        return self.directory / "configuration" / name


# Who shows which certificate: user, groups.
IDENTITIES: dict[str, tuple[str, list[str]]] = {
    "admin": ("admin", ["system:masters"]),
    "kube-controller-manager": ("system:kube-controller-manager", []),
    "kube-scheduler": ("system:kube-scheduler", []),
    "kubelet": (f"system:node:{NODE_NAME}", ["system:nodes"]),
    "kube-proxy": ("system:kube-proxy", []),
    "coredns": ("system:coredns", []),
    "front-proxy": ("front-proxy-client", []),
}
API_SERVER_NAMES = [
    *("IP:127.0.0.1", f"IP:{API_SERVICE}", f"IP:{NODE_ADDRESS}", "DNS:localhost"),
    *("DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"),
    f"DNS:kubernetes.default.svc.{DOMAIN}",
]
KUBELET_NAMES = [f"DNS:{NODE_NAME}", f"IP:{NODE_ADDRESS}"]


def etcd(layout: Layout) -> list[str]:
    return [
        f"--data-dir={layout.directory / 'etcd'}",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",  # what a crash of the machine would lose is of no use after it
    ]


def kube_apiserver(layout: Layout) -> list[str]:
    pki = layout.pki
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        f"--secure-port={API_PORT}",
        f"--advertise-address={NODE_ADDRESS}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--allow-privileged=true",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        # Logs and exec go from here to the kubelet, whose name nobody resolves.
        f"--kubelet-client-certificate={pki / 'admin.crt'}",
        f"--kubelet-client-key={pki / 'admin.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        # The aggregation layer.
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy.key'}",
        "--enable-aggregator-routing=true",
        f"--audit-policy-file={layout.configuration('audit.yaml')}",
        f"--audit-log-path={layout.audit_log}",
    ]


def kube_controller_manager(layout: Layout, options: Options) -> list[str]:
    return [
        *_client("kube-controller-manager", layout),
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={layout.pki / 'service-accounts.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={layout.pki / 'ca.crt'}",
        f"--cluster-signing-key-file={layout.pki / 'ca.key'}",
        f"--horizontal-pod-autoscaler-sync-period={options.hpa_sync_seconds}s",
        f"--horizontal-pod-autoscaler-downscale-stabilization={options.hpa_downscale_stabilization_seconds}s",
    ]


def kube_scheduler(layout: Layout) -> list[str]:
    return [*_client("kube-scheduler", layout), "--leader-elect=false"]


def kubelet(layout: Layout) -> list[str]:
    return [
        f"--kubeconfig={layout.kubeconfig('kubelet')}",
        f"--config={layout.configuration('kubelet.yaml')}",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={NODE_ADDRESS}",
    ]


def kube_proxy(layout: Layout) -> list[str]:
    return [f"--config={layout.configuration('kube-proxy.yaml')}"]


def coredns(layout: Layout) -> list[str]:
    return ["-conf", str(layout.configuration("Corefile"))]


def containerd(layout: Layout) -> list[str]:
    return ["-c", str(layout.configuration("containerd.toml"))]


def _client(user: str, layout: Layout) -> list[str]:
    file = layout.kubeconfig(user)
    flags = ("--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig")
    return [f"{flag}={file}" for flag in flags]


def configurations(layout: Layout, cgroup: str) -> dict[str, str]:
    """Every file that a component is told to read, by name."""
    return {
        "audit.yaml": yaml.safe_dump(AUDIT_POLICY),
        "kubelet.yaml": yaml.safe_dump(_kubelet_configuration(layout, cgroup)),
        "kube-proxy.yaml": yaml.safe_dump(_kube_proxy_configuration(layout)),
        "containerd.toml": _containerd_configuration(layout),
        "cni/10-bridge.conflist": json.dumps(CNI_NETWORK),
        "Corefile": COREFILE.format(kubeconfig=layout.kubeconfig("coredns")),
    }


# Who called what: verb, resource and answer of every request, without bodies.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}

CNI_NETWORK = {
    "cniVersion": "0.4.0",
    "name": "bridge",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": POD_RANGE}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
    ],
}

COREFILE = f"""\
.:53 {{{{
    errors
    ready
    kubernetes {DOMAIN} in-addr.arpa {{{{
        kubeconfig {{kubeconfig}}
        ttl 5
    }}}}
    cache 5
    loadbalance
}}}}
"""

# CoreDNS runs beside the kubelet, not as a pod: a Service without a selector leads to it.
DNS_MANIFESTS: list[dict[str, Any]] = [
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {
            "clusterIP": DNS_SERVICE,
            "ports": [
                {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
            ],
        },
    },
    {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns-node",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [NODE_ADDRESS]}],
        "ports": [
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}],
    },
]


def _kubelet_configuration(layout: Layout, cgroup: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki / "kubelet.crt"),
        "tlsPrivateKeyFile": str(layout.pki / "kubelet.key"),
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupRoot": f"/{cgroup}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": DOMAIN,
        "resolvConf": "/dev/null",
        "maxPods": 250,
        # Nothing here can pull an image again, so none is ever removed to make room.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "volumePluginDir": str(layout.directory / "volume-plugins"),
    }


def _kube_proxy_configuration(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(layout.kubeconfig("kube-proxy"))},
        "mode": "iptables",
        "clusterCIDR": POD_RANGE,
        "hostnameOverride": NODE_NAME,
        # These would set what only the host may set.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _containerd_configuration(layout: Layout) -> str:
    # Without CAP_SYS_RESOURCE nobody may lower an OOM score, and runc dies: "can't get final child's PID".
    return f"""\
version = 2
root = "{layout.directory / "containerd"}"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{layout.configuration("cni")}"
"""
