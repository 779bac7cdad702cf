"""What users, other objects and the cluster do wrong is told, harms nobody else, and heals when put right."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from draftline_operator.cluster.client import ClusterClient, load_configuration
from draftline_operator.constants import SECRETS_HASH_ANNOTATION
from draftline_operator.models.kinds import (
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    POD_DISRUPTION_BUDGET,
    SECRET,
    SERVICE,
    SPECULATIVE_DEPLOYMENT,
    Kind,
)
from draftline_operator.services.reconcile import reconcile
from support.kube.local import LocalCluster
from support.operator_world import NAME, World
from support.speculative_deployments import AUTOSCALED, PAIR


async def revision(world: World) -> str:
    annotations = (await world.existing(DEPLOYMENT))["metadata"]["annotations"]
    return str(annotations["deployment.kubernetes.io/revision"])


# -------------------------------------------------------------------------------------------- foreign objects

FOREIGN: dict[Kind, dict[str, Any]] = {
    DEPLOYMENT: {
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "theirs"}},
            "template": {
                "metadata": {"labels": {"app": "theirs"}},
                "spec": {"containers": [{"name": "a", "image": "a"}]},
            },
        }
    },
    SERVICE: {"spec": {"ports": [{"port": 80}], "selector": {"app": "theirs"}}},
    POD_DISRUPTION_BUDGET: {"spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "theirs"}}}},
    HORIZONTAL_POD_AUTOSCALER: {
        "spec": {
            "maxReplicas": 2,
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs"},
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}},
                }
            ],
        }
    },
}


@pytest.mark.parametrize("kind", FOREIGN, ids=str)
async def test_a_foreign_object_of_a_childs_name_is_left_alone(world: World, kind: Kind) -> None:
    metadata = {"name": NAME, "namespace": world.namespace}
    theirs = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **FOREIGN[kind]}
    before = await world.client.create(copy.deepcopy(theirs))
    await world.create(AUTOSCALED)
    outcome, writes = await world.reconcile()
    assert [verb for verb, _, _ in writes] == ["patch/status"]
    assert outcome.requeue_after is not None
    assert (await world.conditions())["Ready"] == ("False", "NameConflict")
    after = await world.existing(kind)
    assert after["spec"] == before["spec"] or kind == DEPLOYMENT
    assert after["metadata"]["generation"] == before["metadata"]["generation"] if kind == DEPLOYMENT else True
    await world.client.delete(kind, world.namespace, NAME)
    await world.settle()
    assert (await world.conditions())["Ready"][0] == "True"


# ---------------------------------------------------------------------------------------------- invalid specs


async def test_a_spec_that_cannot_be_followed_is_told_once_and_the_old_pods_serve(world: World) -> None:
    await world.create()
    await world.create(name="healthy")
    await world.settle(NAME, "healthy")
    before = await revision(world)
    await world.change({"target": {"model": {"uri": "file:///models/target"}}})
    outcome, writes = await world.reconcile()
    assert [verb for verb, _, _ in writes] == ["patch/status"]
    assert outcome.requeue_after is None
    _, again = await world.reconcile()
    assert again == []
    conditions = await world.conditions()
    assert conditions["Ready"] == ("False", "InvalidSpec")
    assert conditions["Available"][0] == "True"
    status = await world.status()
    (ready,) = [c for c in status["conditions"] if c["type"] == "Ready"]
    assert ready["message"].startswith("spec.target.model.uri: ")
    await world.change({"replicas": 2}, name="healthy")
    await world.settle("healthy")
    assert (await world.status("healthy"))["readyReplicas"] == 2
    await world.change({"target": {"model": {"uri": PAIR["target"]["model"]["uri"]}}})
    await world.settle()
    assert (await world.conditions())["Ready"][0] == "True"
    assert await revision(world) == before


async def test_what_only_the_api_server_finds_wrong_is_told_without_a_hot_loop(world: World) -> None:
    toleration = {"key": "a", "operator": "Sometimes"}
    await world.create({**PAIR, "podTemplate": {"tolerations": [toleration]}})
    outcome, _ = await world.reconcile()
    assert (await world.conditions())["Ready"] == ("False", "Rejected")
    assert outcome.requeue_after is not None
    assert outcome.requeue_after >= 60
    await world.change({"podTemplate": {"tolerations": [{"key": "a", "operator": "Exists"}]}})
    await world.settle()
    assert (await world.conditions())["Ready"][0] == "True"


# ---------------------------------------------------------------------------------------------------- secrets

WITH_SECRET: dict[str, Any] = {
    "target": {
        "model": {"uri": "hf://org/target", "revision": "a" * 40, "credentialsSecretRef": {"name": "hub"}}
    }
}


async def write_secret(world: World, token: str) -> None:
    metadata = {"name": "hub", "namespace": world.namespace}
    manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"HF_TOKEN": token}}
    await world.client.apply(manifest, field_manager="user")


async def test_a_changed_secret_rolls_out_once_and_the_same_bytes_do_not(world: World) -> None:
    await write_secret(world, "hf_first")
    await world.create(WITH_SECRET)
    await world.settle()
    first = await revision(world)
    await write_secret(world, "hf_first")
    await world.settle()
    assert await revision(world) == first
    await write_secret(world, "hf_second")
    await world.settle()
    assert int(await revision(world)) == int(first) + 1
    template = (await world.existing(DEPLOYMENT))["spec"]["template"]
    assert SECRETS_HASH_ANNOTATION in template["metadata"]["annotations"]
    texts = [json.dumps(template), json.dumps(await world.existing(SPECULATIVE_DEPLOYMENT))]
    assert not [text for text in texts if "hf_" in text.replace("hf://", "")]


async def test_a_deleted_secret_degrades_and_touches_nothing(world: World) -> None:
    await write_secret(world, "hf_first")
    await world.create(WITH_SECRET)
    await world.settle()
    first = await revision(world)
    await world.client.delete(SECRET, world.namespace, "hub")
    await world.change({"image": "registry.test/server:2"})
    await world.settle()
    conditions = await world.conditions()
    assert conditions["Degraded"] == ("True", "SecretNotFound")
    assert conditions["Available"][0] == "True"
    assert await revision(world) == first
    await write_secret(world, "hf_first")
    await world.settle()
    assert (await world.conditions())["Degraded"][0] == "False"
    assert int(await revision(world)) == int(first) + 1, "the change of the image"


async def test_nothing_is_started_for_want_of_a_secret(world: World) -> None:
    await world.create(WITH_SECRET)
    _, writes = await world.reconcile()
    assert not [write for write in writes if write[1] in ("Job", "Deployment")]
    assert (await world.conditions())["Ready"] == ("False", "SecretNotFound")


# --------------------------------------------------------------------------------------------- removed fields

ADDITIONS: dict[str, Any] = {
    "env": [{"name": "A", "value": "1"}],
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 1,
                    "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
                }
            ]
        }
    },
    "imagePullSecrets": [{"name": "pull"}],
    "volumes": [{"name": "extra", "emptyDir": {}}],
    "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "resources": {"limits": {"cpu": "2", "memory": "1Gi"}},
    "labels": {"team": "a"},
    "annotations": {"note": "a"},
}


async def test_what_is_taken_out_of_the_spec_is_gone_and_what_others_added_stays(world: World) -> None:
    await world.create()
    await world.settle()
    plain = (await world.existing(DEPLOYMENT))["spec"]["template"]
    await world.change({"podTemplate": ADDITIONS})
    await world.settle()
    full = (await world.existing(DEPLOYMENT))["spec"]["template"]
    assert full["spec"]["nodeSelector"] == {"pool": "a"}
    restarted = {"kubectl.kubernetes.io/restartedAt": "2026-11-30T00:00:00Z"}
    restart = {"spec": {"template": {"metadata": {"annotations": restarted}}}}
    await world.client.patch(DEPLOYMENT, world.namespace, NAME, restart)
    await world.change({"podTemplate": None})
    await world.settle()
    after = (await world.existing(DEPLOYMENT))["spec"]["template"]
    assert after["metadata"]["annotations"].pop("kubectl.kubernetes.io/restartedAt")
    assert after == plain


# -------------------------------------------------------------------------------------------- selectors, pods


async def test_a_selector_of_an_older_operator_is_kept(world: World) -> None:
    await world.create()
    await world.settle()
    live = await world.existing(DEPLOYMENT)
    await world.client.delete(DEPLOYMENT, world.namespace, NAME)

    async def is_gone() -> bool:
        return await world.get(DEPLOYMENT) is None

    await world.until(is_gone)
    old = {"app": "old-way"}
    metadata = {key: live["metadata"][key] for key in ("name", "namespace", "labels", "ownerReferences")}
    template = copy.deepcopy(live["spec"]["template"])
    template["metadata"]["labels"].update(old)
    spec = {**live["spec"], "selector": {"matchLabels": old}, "template": template}
    await world.client.create({**live, "metadata": metadata, "spec": spec, "status": {}})
    await world.settle()
    after = await world.existing(DEPLOYMENT)
    assert after["spec"]["selector"] == {"matchLabels": old}
    assert (await world.conditions())["Ready"][0] == "True"
    assert (await world.reconcile())[1] == []


async def test_pods_that_crash_are_told_and_the_old_ones_serve_on(world: World) -> None:
    await world.create({**PAIR, "replicas": 2})
    await world.settle()
    world.kubelet.crashing = "registry.test/server:bad"
    await world.change({"image": "registry.test/server:bad"})
    await world.settle()
    conditions = await world.conditions()
    assert conditions["Degraded"] == ("True", "CrashLoopBackOff")
    assert conditions["Available"][0] == "True"
    body = await world.existing(SPECULATIVE_DEPLOYMENT)
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"]
    await world.change({"image": "registry.test/server:1"})
    await world.settle()
    assert (await world.conditions())["Degraded"][0] == "False"


async def test_somebody_elses_autoscaler_of_the_same_pods_is_told(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    theirs = copy.deepcopy(FOREIGN[HORIZONTAL_POD_AUTOSCALER])
    theirs["spec"]["scaleTargetRef"]["name"] = NAME
    metadata = {"name": "theirs", "namespace": world.namespace}
    kind = HORIZONTAL_POD_AUTOSCALER
    await world.client.create(
        {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **theirs}
    )
    await world.settle()
    assert (await world.conditions())["AutoscalingActive"] == ("False", "OtherAutoscaler")


async def test_a_missing_metric_is_told_and_replicas_stay(world: World) -> None:
    await world.create({**AUTOSCALED, "replicas": 3})
    await world.settle()

    async def is_told() -> bool:
        await world.reconcile()
        return (await world.conditions())["AutoscalingActive"] == ("False", "AutoscalingDegraded")

    await world.until(is_told, seconds=30)
    assert (await world.existing(DEPLOYMENT))["spec"]["replicas"] == 3


# ----------------------------------------------------------------------------------------------------- rights


async def test_a_right_that_is_missing_is_a_condition_and_no_hot_loop(
    world: World, local_control_plane: LocalCluster
) -> None:
    """All rights but that on Services."""
    user = f"system:serviceaccount:{world.namespace}:operator"
    rules = [
        {"apiGroups": ["draftline.dev"], "resources": ["*"], "verbs": ["*"]},
        {
            "apiGroups": [""],
            "resources": ["configmaps", "pods", "secrets", "serviceaccounts"],
            "verbs": ["*"],
        },
        {"apiGroups": [""], "resources": ["services"], "verbs": ["get"]},
        {
            "apiGroups": ["apps", "batch", "autoscaling", "policy", "networking.k8s.io"],
            "resources": ["*"],
            "verbs": ["*"],
        },
    ]
    metadata = {"name": "operator", "namespace": world.namespace}
    rbac = "rbac.authorization.k8s.io/v1"
    role = {"apiVersion": rbac, "kind": "Role", "metadata": metadata, "rules": rules}
    subject = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}
    reference = {"kind": "Role", "apiGroup": "rbac.authorization.k8s.io", "name": "operator"}
    binding = {
        "apiVersion": rbac,
        "kind": "RoleBinding",
        "metadata": metadata,
        "subjects": [subject],
        "roleRef": reference,
    }
    local_control_plane.apply(role, binding, namespace=world.namespace)
    configuration = await load_configuration(str(local_control_plane.kubeconfig_for(user)))
    await world.create()
    async with ClusterClient(configuration) as limited:
        outcome = await reconcile(world.namespace, NAME, world.surroundings(limited))
    assert outcome.requeue_after is not None
    assert outcome.requeue_after >= 60
    assert (await world.conditions())["Ready"] == ("False", "Forbidden")
    await world.settle()
    assert (await world.conditions())["Ready"][0] == "True"
