"""Who may talk to the pods, and to whom they may talk.

gRPC is open to every pod of the cluster, since only the user knows the clients; the admin port to the
operator and to collectors of metrics; probes come from the node, which policies never stop. Pods themselves
need names, and where models are fetched HTTPS, and the ports of endpoints that the environment names.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from draftline_operator import constants
from draftline_operator.models.names import serving_name
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.models.spec import SpeculativeDeploymentSpec
from draftline_operator.resources.labels import object_metadata

_COLLECTORS = ["alloy", "grafana-agent", "opentelemetry-collector", "prometheus", "vmagent"]
_DNS_PORT = 53
_HTTPS_PORT = 443
_DEFAULT_PORTS = {"http": 80, "https": _HTTPS_PORT}
_ENDPOINTS = frozenset(
    {
        "ALL_PROXY",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "HF_ENDPOINT",
        "HTTPS_PROXY",
        "HTTP_PROXY",
    }
)


def render_network_policy(resource: Resource, settings: RenderSettings) -> Manifest:
    """Of serving and preflight pods."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(resource, serving_name(resource.name)),
        "spec": {
            "podSelector": {
                "matchLabels": {
                    constants.NAME_LABEL: constants.APP_NAME,
                    constants.INSTANCE_LABEL: resource.name,
                }
            },
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": [{"namespaceSelector": {}}], "ports": [_tcp(constants.GRPC_PORT)]},
                {"from": _readers_of_metrics(settings), "ports": [_tcp(constants.ADMIN_PORT)]},
            ],
            "egress": _egress(resource.spec),
        },
    }


def _readers_of_metrics(settings: RenderSettings) -> list[Manifest]:
    operator = {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}}
    collectors = [{"key": constants.NAME_LABEL, "operator": "In", "values": _COLLECTORS}]
    return [
        {"namespaceSelector": operator},
        {"namespaceSelector": {}, "podSelector": {"matchExpressions": collectors}},
    ]


def _egress(spec: SpeculativeDeploymentSpec) -> list[Manifest]:
    names = {"ports": [{"protocol": "UDP", "port": _DNS_PORT}, _tcp(_DNS_PORT)]}
    ports = sorted({_HTTPS_PORT, *_endpoint_ports(spec)})
    return [names, *([{"ports": [_tcp(port) for port in ports]}] if spec.fetches_models else [])]


def _endpoint_ports(spec: SpeculativeDeploymentSpec) -> Iterator[int]:
    for variable in spec.pod_template.env:
        if str(variable["name"]).upper() in _ENDPOINTS and isinstance(variable.get("value"), str):
            port = _port(variable["value"])
            if port is not None:
                yield port


def _port(url: str) -> int | None:
    try:
        parts = urlsplit(url)
        return parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None


def _tcp(port: int) -> Manifest:
    return {"protocol": "TCP", "port": port}
