"""The Deployment of the serving pods.

Its strategy is chosen so that a rollout ends on a full node: where pods need accelerators there may be no
spare one, so an old pod leaves before a new one comes; on CPUs the new one comes first. Its replicas are
written by the operator alone: people and autoscalers act on the resource's /scale.
"""

from __future__ import annotations

from typing import Any, Final

from draftline_operator import constants
from draftline_operator.models.names import config_map_name, serving_name
from draftline_operator.models.preflight import PreflightResult
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.models.spec import SpeculativeDeploymentSpec
from draftline_operator.resources import paths
from draftline_operator.resources.config_map import config_hash
from draftline_operator.resources.labels import common_labels, object_metadata, selector_labels
from draftline_operator.resources.model_volumes import ModelVolumes, model_volumes
from draftline_operator.resources.pair import pair_key
from draftline_operator.resources.pod_additions import added_annotations, added_labels
from draftline_operator.resources.pods import container, fetch_containers, model_mounts, pod_spec
from draftline_operator.resources.probes import probes, startup_budget_seconds
from draftline_operator.resources.times import (
    FETCH_SECONDS,
    PRE_STOP_SECONDS,
    PREPARATION_SECONDS,
    termination_grace_period_seconds,
)

SERVER_CONTAINER: Final = "server"


def render_deployment(
    resource: Resource,
    settings: RenderSettings,
    *,
    pair_digest: str | None,
    replicas: int,
    secrets_hash: str | None,
    verified: PreflightResult | None = None,
) -> Manifest:
    """A pod that computes another `pair_digest` never becomes ready.

    `verified` is the preflight result that it comes from: models are fetched just as they were then.
    `secrets_hash` is of the Secrets that the pods use.
    """
    spec = resource.spec
    models = model_volumes(resource, settings, verified=verified)
    key = config_hash(resource, pair_digest=pair_digest)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": object_metadata(resource, serving_name(resource.name)),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": progress_deadline_seconds(spec, models),
            "selector": {"matchLabels": selector_labels(resource.name)},
            "strategy": _strategy(spec),
            "template": {
                "metadata": {
                    "labels": {
                        **added_labels(spec),
                        **common_labels(resource),
                        constants.REVISION_LABEL: pair_key(resource, settings),
                    },
                    "annotations": {
                        **added_annotations(spec),
                        constants.DEFAULT_CONTAINER_ANNOTATION: SERVER_CONTAINER,
                        constants.CONFIG_HASH_ANNOTATION: key,
                        **({constants.SECRETS_HASH_ANNOTATION: secrets_hash} if secrets_hash else {}),
                    },
                },
                "spec": _serving_pod(
                    resource, settings, models, config_map=config_map_name(resource.name, key)
                ),
            },
        },
    }


def progress_deadline_seconds(spec: SpeculativeDeploymentSpec, models: ModelVolumes) -> int:
    """Longer than a pod may take to come, after another has left: only what hangs is called failed."""
    fetching = FETCH_SECONDS if models.fetches else 0
    leaving = termination_grace_period_seconds(spec)
    return startup_budget_seconds(spec) + leaving + fetching + PREPARATION_SECONDS


def _strategy(spec: SpeculativeDeploymentSpec) -> dict[str, Any]:
    surge, unavailable = (1, 0) if spec.accelerator is None else (0, 1)
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


def _serving_pod(
    resource: Resource, settings: RenderSettings, models: ModelVolumes, *, config_map: str
) -> dict[str, Any]:
    spec = resource.spec
    fetches = fetch_containers(resource, settings, models)
    server = container(
        resource,
        settings,
        SERVER_CONTAINER,
        ["serve", "--config", paths.CONFIG_PATH],
        mounts=model_mounts(models),
        with_accelerators=True,
    )
    return {
        **pod_spec(resource, settings, models, config_map=config_map),
        "topologySpreadConstraints": _topology_spread(resource),
        "terminationGracePeriodSeconds": termination_grace_period_seconds(spec),
        **({"initContainers": fetches} if fetches else {}),
        "containers": [
            {
                **server,
                "ports": [
                    {"name": "grpc", "containerPort": constants.GRPC_PORT, "protocol": "TCP"},
                    {"name": "admin", "containerPort": constants.ADMIN_PORT, "protocol": "TCP"},
                ],
                **probes(spec),
                "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
            }
        ],
    }


def _topology_spread(resource: Resource) -> list[Manifest]:
    """Softly over hosts and zones, for each revision by itself; the user's own replace it."""
    given = resource.spec.pod_template.topology_spread_constraints
    if given:
        return [dict(constraint) for constraint in given]
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector_labels(resource.name)},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]
