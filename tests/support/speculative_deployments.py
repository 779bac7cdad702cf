"""Resources for tests of the control plane: specs as users write them and what the operator makes of them."""

from __future__ import annotations

import copy
from typing import Any

from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.models.spec import parse_spec
from draftline_operator.resources.config_map import render_config_map
from draftline_operator.resources.deployment import render_deployment
from draftline_operator.resources.horizontal_pod_autoscaler import render_horizontal_pod_autoscaler
from draftline_operator.resources.network_policy import render_network_policy
from draftline_operator.resources.pair import pair_key
from draftline_operator.resources.pair_record import render_pair_record
from draftline_operator.resources.pod_disruption_budget import render_pod_disruption_budget
from draftline_operator.resources.preflight_job import render_preflight_job
from draftline_operator.resources.scaled_object import render_scaled_object
from draftline_operator.resources.service_account import render_service_account
from draftline_operator.resources.service_monitor import render_service_monitor
from draftline_operator.resources.services import render_client_service, render_headless_service

SETTINGS = RenderSettings(
    default_image="registry.test/draftline-server:1",
    operator_namespace="draftline-system",
    metrics_url="http://draftline-operator.draftline-system.svc:8080",
)
PAIR_DIGEST = f"sha256:{'a' * 64}"

MINIMAL: dict[str, Any] = {"target": {"model": {"uri": "pvc://models/target"}}}
PAIR: dict[str, Any] = {**MINIMAL, "draft": {"model": {"uri": "pvc://models/draft"}}}
AUTOSCALED: dict[str, Any] = {**PAIR, "autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
FULL: dict[str, Any] = {
    "image": "registry.test/draftline-server:2",
    "accelerator": {"resourceName": "nvidia.com/gpu", "memory": "80Gi", "count": 1},
    "modelCache": {"persistentVolumeClaim": "cache"},
    "target": {
        "model": {
            "uri": "hf://org/target",
            "revision": "main",
            "digest": f"sha256:{'1' * 64}",
            "credentialsSecretRef": {"name": "hub"},
        },
        "dtype": "bfloat16",
        "tensorParallelSize": 1,
    },
    "draft": {
        "model": {"uri": "s3://bucket/models/draft", "credentialsSecretRef": {"name": "bucket"}},
        "dtype": "bfloat16",
        "tensorParallelSize": 1,
        "placement": "Shared",
    },
    "speculation": {
        "enabled": True,
        "methods": ["DraftModel", "NGram"],
        "numSpeculativeTokens": 6,
        "maxBatchSize": 4,
        "adaptive": False,
        "fallbackToStandardDecoding": False,
        "minAcceptanceRate": 0.4,
    },
    "serving": {
        "maxConcurrentRequests": 16,
        "maxQueueLength": 100,
        "maxContextLength": 4096,
        "contextOverflow": "TruncateLeft",
        "maxTokensPerRequest": 512,
        "maxBatchedTokens": 1024,
        "memoryFraction": 0.8,
        "kvCacheMemory": "4Gi",
        "requestTimeoutSeconds": 60,
        "queueTimeoutSeconds": 10,
        "lameDuckSeconds": 7,
        "maxConnectionAgeSeconds": 20,
        "startupTimeoutSeconds": 900,
    },
    "replicas": 2,
    "autoscaling": {
        "minReplicas": 1,
        "maxReplicas": 8,
        "queueDepth": {"highWatermark": 4, "lowWatermark": 1},
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 60}},
    },
    "disruption": {"maxUnavailable": 1, "drainTimeoutSeconds": 90},
    "podTemplate": {
        "labels": {"team": "nlp"},
        "annotations": {"example.com/note": "hello"},
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "nlp", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},
                    ]
                }
            }
        },
        "topologySpreadConstraints": [
            {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "schedulerName": "custom",
        "imagePullSecrets": [{"name": "pull"}],
        "volumes": [{"name": "certificates", "configMap": {"name": "certificates"}}],
        "volumeMounts": [{"name": "certificates", "mountPath": "/certificates", "readOnly": True}],
        "env": [{"name": "SECOND", "value": "2"}, {"name": "FIRST", "value": "$(SECOND)1"}],
        "resources": {
            "requests": {"cpu": "4", "memory": "16Gi", "ephemeral-storage": "1Gi"},
            "limits": {"cpu": "8", "memory": "32Gi"},
        },
    },
}


def resource(spec: dict[str, Any] | None = None, *, name: str = "chat", uid: str = "uid-1") -> Resource:
    """As it would be read from the API server."""
    parsed = parse_spec(copy.deepcopy(spec if spec is not None else MINIMAL))
    return Resource(name=name, namespace="models", uid=uid, generation=1, spec=parsed)


def changed(spec: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy with values set by their paths, parts joined by two underscores; None removes."""
    result = copy.deepcopy(spec)
    for path, value in values.items():
        *parents, last = path.split("__")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return result


def render_all(described: Resource, settings: RenderSettings = SETTINGS) -> list[Manifest]:
    """Every child that there can be, in the order in which they are applied."""
    children = [
        render_service_account(described),
        render_config_map(described, pair_digest=None),
        render_preflight_job(described, settings, accelerator_memory_bytes=None),
        render_pair_record(described, pair_key(described, settings), "{}"),
        render_config_map(described, pair_digest=PAIR_DIGEST),
        deployment(described, settings),
        render_client_service(described),
        render_headless_service(described),
        render_pod_disruption_budget(described),
        render_network_policy(described, settings),
        render_service_monitor(described, settings),
    ]
    if described.spec.autoscaling is not None:
        children.append(render_horizontal_pod_autoscaler(described, settings))
        children.append(render_scaled_object(described, settings))
    return children


def deployment(described: Resource, settings: RenderSettings = SETTINGS, **options: Any) -> Manifest:
    """The Deployment of a verified pair."""
    given = {"pair_digest": PAIR_DIGEST, "replicas": 1, "secrets_hash": None, **options}
    return render_deployment(described, settings, **given)


def preflight_job(
    described: Resource, settings: RenderSettings = SETTINGS, *, memory: int | None = None
) -> Manifest:
    return render_preflight_job(described, settings, accelerator_memory_bytes=memory)


def pod_of(manifest: Manifest) -> dict[str, Any]:
    """The pod spec of a Deployment or a Job."""
    pod: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return pod


def server_of(manifest: Manifest) -> dict[str, Any]:
    """The one container of a Deployment or a Job."""
    (container,) = pod_of(manifest)["containers"]
    return dict(container)
