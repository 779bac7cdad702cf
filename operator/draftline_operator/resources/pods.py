"""What serving pods and the preflight pod have in common: environment, volumes, security, placement."""

from __future__ import annotations

from typing import Any, Final

from draftline_operator.models.names import serving_name
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.models.spec import SpeculativeDeploymentSpec
from draftline_operator.resources import paths
from draftline_operator.resources.affinity import combined_affinity
from draftline_operator.resources.container_resources import container_resources, cpu_limit
from draftline_operator.resources.model_volumes import ModelVolumes
from draftline_operator.resources.pod_additions import added_env, added_mounts, added_volumes

_ENV: Final = {
    "HOME": paths.WORK_DIRECTORY,
    "XDG_CACHE_HOME": paths.WORK_DIRECTORY,
    "HF_HOME": paths.HUGGING_FACE_DIRECTORY,
}
# What is served was verified; nothing may be fetched on the side.
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
_NVIDIA: Final = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
_THREADS = "OMP_NUM_THREADS"

# Of a group that no image has; volumes are made writable for it where they can be.
_GROUP: Final = 65532
_SHARED_MEMORY = {"cpu": "1Gi", "accelerator": "8Gi"}


def container(
    resource: Resource,
    settings: RenderSettings,
    name: str,
    args: list[str],
    *,
    mounts: list[Manifest],
    is_fetch: bool = False,
    with_accelerators: bool = False,
) -> Manifest:
    """A container of the serving image, under the restricted pod security standard."""
    spec = resource.spec
    resources = container_resources(spec, with_accelerators=with_accelerators)
    return {
        "name": name,
        "image": spec.image or settings.default_image,
        "imagePullPolicy": settings.image_pull_policy,
        "args": args,
        "env": _environment(spec, is_fetch=is_fetch),
        **({"resources": resources} if resources else {}),
        "volumeMounts": [
            *mounts,
            {"name": paths.WORK_VOLUME, "mountPath": paths.WORK_DIRECTORY},
            {"name": paths.TEMPORARY_VOLUME, "mountPath": paths.TEMPORARY_DIRECTORY},
            *added_mounts(spec),
        ],
        # What a crash said last shows up in the pod's status, and so in conditions.
        "terminationMessagePath": paths.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def model_mounts(models: ModelVolumes) -> list[Manifest]:
    """Of containers that read configuration and models."""
    config = {"name": paths.CONFIG_VOLUME, "mountPath": paths.CONFIG_DIRECTORY, "readOnly": True}
    shared_memory = {"name": paths.SHARED_MEMORY_VOLUME, "mountPath": paths.SHARED_MEMORY_DIRECTORY}
    return [config, *models.mounts, shared_memory]


def fetch_containers(resource: Resource, settings: RenderSettings, models: ModelVolumes) -> list[Manifest]:
    """One after the other; what is there already is not fetched again. Only they see the credentials."""
    return [
        {
            **container(
                resource,
                settings,
                fetch.name,
                list(fetch.args),
                mounts=list(models.fetch_mounts),
                is_fetch=True,
            ),
            **({"envFrom": [{"secretRef": {"name": fetch.secret}}]} if fetch.secret is not None else {}),
        }
        for fetch in models.fetches
    ]


def pod_spec(
    resource: Resource, settings: RenderSettings, models: ModelVolumes, *, config_map: str
) -> dict[str, Any]:
    """All but the containers, and what only one kind of pod has."""
    spec = resource.spec
    template = spec.pod_template
    given = {
        "nodeSelector": dict(sorted(template.node_selector.items())),
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "schedulerName": template.scheduler_name,
        "imagePullSecrets": [{"name": secret.name} for secret in template.image_pull_secrets],
        "tolerations": _tolerations(spec),
    }
    return {
        "serviceAccountName": serving_name(resource.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "fsGroup": _GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "affinity": combined_affinity(template.affinity),
        **{key: value for key, value in given.items() if value},
        "volumes": [
            {"name": paths.CONFIG_VOLUME, "configMap": {"name": config_map}},
            *models.volumes,
            {
                "name": paths.SHARED_MEMORY_VOLUME,
                "emptyDir": {
                    "medium": "Memory",
                    "sizeLimit": _SHARED_MEMORY["cpu" if spec.accelerator is None else "accelerator"],
                },
            },
            {"name": paths.WORK_VOLUME, "emptyDir": {}},
            {"name": paths.TEMPORARY_VOLUME, "emptyDir": {}},
            *added_volumes(spec, settings),
        ],
    }


def _environment(spec: SpeculativeDeploymentSpec, *, is_fetch: bool) -> list[Manifest]:
    is_nvidia = spec.accelerator is not None and spec.accelerator.resource_name.startswith("nvidia.com/")
    own = _ENV | ({} if is_fetch else _OFFLINE) | (_NVIDIA if is_nvidia else {})
    added = added_env(spec, (*_ENV, *_OFFLINE, *(_NVIDIA if is_nvidia else ())))
    threads = cpu_limit(spec)
    if threads is not None and all(variable["name"] != _THREADS for variable in added):
        # Libraries count the node's cores, not the container's share, and would then fight for it.
        own[_THREADS] = str(threads)
    return [*({"name": name, "value": value} for name, value in own.items()), *added]


def _tolerations(spec: SpeculativeDeploymentSpec) -> list[Manifest]:
    own = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in _taints(spec)]
    return own + [dict(toleration) for toleration in spec.pod_template.tolerations if toleration not in own]


def _taints(spec: SpeculativeDeploymentSpec) -> list[str]:
    """Nodes with accelerators are tainted by the resource's name; those with slices of a GPU by the GPU's."""
    if spec.accelerator is None:
        return []
    name = spec.accelerator.resource_name
    return sorted({name, "nvidia.com/gpu"} if name.startswith("nvidia.com/") else {name})
