"""The Job that verifies a model pair before any pod of it is rolled out.

It reads the same volumes in the same places as the serving pods, but asks for no accelerator, which may all
be in use: what one can hold is passed as a number. Its labels keep it out of whatever selects serving pods.
It has no time to live; the operator records the result and then deletes it.
"""

from __future__ import annotations

from typing import Final

from draftline_operator import constants
from draftline_operator.models.names import config_map_name, preflight_name
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.resources import paths
from draftline_operator.resources.config_map import config_hash
from draftline_operator.resources.labels import common_labels, object_metadata
from draftline_operator.resources.model_volumes import model_volumes
from draftline_operator.resources.pair import pair_key
from draftline_operator.resources.pod_additions import added_annotations, added_labels
from draftline_operator.resources.pods import container, fetch_containers, model_mounts, pod_spec
from draftline_operator.resources.times import FETCH_SECONDS, PREPARATION_SECONDS

PREFLIGHT_CONTAINER: Final = "preflight"
REFUSED_EXIT_CODE: Final = 2
"""Of a pair that may not be served; running it again would change nothing."""

_MAX_RETRIES = 3


def render_preflight_job(
    resource: Resource, settings: RenderSettings, *, accelerator_memory_bytes: int | None
) -> Manifest:
    """Its configuration is `render_config_map(resource, pair_digest=None)`, which must be there, too."""
    spec = resource.spec
    key = pair_key(resource, settings)
    models = model_volumes(resource, settings)
    labels = {**common_labels(resource, component=constants.PREFLIGHT), constants.REVISION_LABEL: key}
    config_map = config_map_name(resource.name, config_hash(resource, pair_digest=None))
    fetches = fetch_containers(resource, settings, models)
    memory = (
        [] if accelerator_memory_bytes is None else ["--accelerator-memory", str(accelerator_memory_bytes)]
    )
    args = ["preflight", "--config", paths.CONFIG_PATH, "--result", paths.TERMINATION_LOG, *memory]
    # Files are read once, which takes about as long as loading them does.
    deadline = spec.serving.startup_timeout_seconds + PREPARATION_SECONDS + (FETCH_SECONDS if fetches else 0)
    metadata = object_metadata(resource, preflight_name(resource.name, key), component=constants.PREFLIGHT)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**metadata, "labels": labels},
        "spec": {
            "backoffLimit": _MAX_RETRIES,
            "activeDeadlineSeconds": deadline,
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {
                "metadata": {
                    "labels": {**added_labels(spec), **labels},
                    "annotations": {
                        **added_annotations(spec),
                        constants.DEFAULT_CONTAINER_ANNOTATION: PREFLIGHT_CONTAINER,
                    },
                },
                "spec": {
                    **pod_spec(resource, settings, models, config_map=config_map),
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 30,
                    **({"initContainers": fetches} if fetches else {}),
                    "containers": [
                        container(resource, settings, PREFLIGHT_CONTAINER, args, mounts=model_mounts(models))
                    ],
                },
            },
        },
    }


def _failure_rules() -> list[Manifest]:
    """A verdict ends the Job; an eviction does not count as a try."""
    verdict = {"containerName": PREFLIGHT_CONTAINER, "operator": "In", "values": [REFUSED_EXIT_CODE]}
    return [
        {"action": "FailJob", "onExitCodes": verdict},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
