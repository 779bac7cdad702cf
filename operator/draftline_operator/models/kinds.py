"""The kinds that the operator reads and writes, and where the API server keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftline_operator.constants import API_VERSION, KIND, PLURAL


@dataclass(frozen=True, slots=True)
class Kind:
    """A namespaced kind, unless said otherwise."""

    api_version: str
    kind: str
    plural: str
    is_namespaced: bool = True

    def __str__(self) -> str:
        return self.kind


SPECULATIVE_DEPLOYMENT: Final = Kind(API_VERSION, KIND, PLURAL)
CONFIG_MAP: Final = Kind("v1", "ConfigMap", "configmaps")
NODE: Final = Kind("v1", "Node", "nodes", is_namespaced=False)
POD: Final = Kind("v1", "Pod", "pods")
SECRET: Final = Kind("v1", "Secret", "secrets")
SERVICE: Final = Kind("v1", "Service", "services")
SERVICE_ACCOUNT: Final = Kind("v1", "ServiceAccount", "serviceaccounts")
DEPLOYMENT: Final = Kind("apps/v1", "Deployment", "deployments")
JOB: Final = Kind("batch/v1", "Job", "jobs")
HORIZONTAL_POD_AUTOSCALER: Final = Kind(
    "autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"
)
POD_DISRUPTION_BUDGET: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY: Final = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LEASE: Final = Kind("coordination.k8s.io/v1", "Lease", "leases")
SERVICE_MONITOR: Final = Kind("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors")
SCALED_OBJECT: Final = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
API_SERVICE: Final = Kind("apiregistration.k8s.io/v1", "APIService", "apiservices", is_namespaced=False)
SUBJECT_ACCESS_REVIEW: Final = Kind(
    "authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews", is_namespaced=False
)

_BY_NAME: Final[Mapping[str, Kind]] = {
    kind.kind: kind
    for kind in (
        SPECULATIVE_DEPLOYMENT,
        CONFIG_MAP,
        NODE,
        POD,
        SECRET,
        SERVICE,
        SERVICE_ACCOUNT,
        DEPLOYMENT,
        JOB,
        HORIZONTAL_POD_AUTOSCALER,
        POD_DISRUPTION_BUDGET,
        NETWORK_POLICY,
        LEASE,
        SERVICE_MONITOR,
        SCALED_OBJECT,
        API_SERVICE,
        SUBJECT_ACCESS_REVIEW,
    )
}


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of a manifest of ours; raises KeyError for any other."""
    return _BY_NAME[manifest["kind"]]
