"""Deployment, preflight Job and budget: rollouts end, drains go on, what was verified is what is served."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.models.preflight import PreflightModel, PreflightResult
from draftline_operator.resources.pod_disruption_budget import render_pod_disruption_budget
from support.speculative_deployments import (
    FULL,
    MINIMAL,
    changed,
    deployment,
    pod_of,
    preflight_job,
    resource,
    server_of,
)

COMMIT = "c" * 40


def verified(**revisions: str | None) -> PreflightResult:
    """Of models with these revisions."""
    models = {
        role: PreflightModel(
            architecture="llama",
            digest=f"sha256:{role[0] * 64}",
            revision=revision,
            weights_bytes=1,
            kv_bytes_per_token=1,
            max_context_length=1,
        )
        for role, revision in revisions.items()
    }
    return PreflightResult(target=models.get("target"), draft=models.get("draft"))


@pytest.mark.parametrize("replicas", [0, 1, 4])
def test_replicas_are_those_that_were_decided_whatever_the_spec_says(replicas: int) -> None:
    assert deployment(resource(FULL), replicas=replicas)["spec"]["replicas"] == replicas


def test_on_a_full_gpu_node_the_old_pod_leaves_first() -> None:
    strategy = deployment(resource(changed(MINIMAL, accelerator={})))["spec"]["strategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }


def test_on_cpus_the_new_pod_comes_first() -> None:
    strategy = deployment(resource(MINIMAL))["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_pods_say_which_container_to_look_at() -> None:
    for manifest, name in (
        (deployment(resource(FULL)), "server"),
        (preflight_job(resource(FULL)), "preflight"),
    ):
        annotations = manifest["spec"]["template"]["metadata"]["annotations"]
        assert annotations["kubectl.kubernetes.io/default-container"] == name == server_of(manifest)["name"]


def test_pods_fetch_the_very_files_that_were_verified() -> None:
    pods = pod_of(deployment(resource(FULL), verified=verified(target=COMMIT, draft=None)))
    target, draft = (container["args"] for container in pods["initContainers"])
    assert target[2:6] == ["--revision", COMMIT, "--digest", f"sha256:{'t' * 64}"]
    assert draft[2:4] == ["--digest", f"sha256:{'d' * 64}"]
    folders = [container["args"][-1] for container in pod_of(preflight_job(resource(FULL)))["initContainers"]]
    assert [target[-1], draft[-1]] == folders


@pytest.mark.parametrize("max_unavailable", [1, 3])
@pytest.mark.parametrize(
    "spec",
    [
        changed(MINIMAL, replicas=1),
        changed(MINIMAL, replicas=3),
        changed(MINIMAL, autoscaling={"minReplicas": 1, "maxReplicas": 5}),
    ],
)
def test_a_node_can_always_be_drained(spec: dict[str, Any], max_unavailable: int) -> None:
    budget = render_pod_disruption_budget(
        resource(changed(spec, disruption={"maxUnavailable": max_unavailable}))
    )
    assert budget["spec"]["maxUnavailable"] == max_unavailable
    assert "minAvailable" not in budget["spec"]
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["spec"]["selector"] == deployment(resource(spec))["spec"]["selector"]


def test_a_verdict_is_not_asked_for_twice_and_an_eviction_is_no_verdict() -> None:
    spec = preflight_job(resource(MINIMAL))["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    refused, disrupted = spec["podFailurePolicy"]["rules"]
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [2])
    assert refused["onExitCodes"]["containerName"] == server_of(preflight_job(resource(MINIMAL)))["name"]
    assert disrupted["action"] == "Ignore"
    assert spec["backoffLimit"] > 0


def test_a_preflight_ends_and_stays_until_its_result_was_read() -> None:
    spec = preflight_job(resource(MINIMAL))["spec"]
    assert spec["activeDeadlineSeconds"] > resource(MINIMAL).spec.serving.startup_timeout_seconds
    assert "ttlSecondsAfterFinished" not in spec
    fetching = preflight_job(resource(FULL))["spec"]["activeDeadlineSeconds"]
    assert fetching > spec["activeDeadlineSeconds"]


def test_the_result_is_the_jobs_termination_message() -> None:
    container = server_of(preflight_job(resource(MINIMAL)))
    assert container["terminationMessagePath"] == "/dev/termination-log"
    assert container["args"] == [
        "preflight",
        "--config",
        "/etc/draftline/config.yaml",
        "--result",
        "/dev/termination-log",
    ]


def test_preflight_has_the_memory_of_a_serving_container() -> None:
    spec = changed(MINIMAL, podTemplate__resources={"limits": {"memory": "2Gi"}})
    served, checked = deployment(resource(spec)), preflight_job(resource(spec))
    assert server_of(served)["resources"] == server_of(checked)["resources"]
