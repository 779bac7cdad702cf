"""A resource gets its children, comes to rest, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

from draftline_operator.constants import POD_DELETION_COST_ANNOTATION
from draftline_operator.models.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    JOB,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    SPECULATIVE_DEPLOYMENT,
    Kind,
)
from draftline_operator.models.names import headless_service_name
from support.kubelet import DIGEST
from support.made_objects import made_objects
from support.operator_world import NAME, World
from support.speculative_deployments import PAIR

AUTOSCALED: dict[str, Any] = {**PAIR, "autoscaling": {"minReplicas": 2, "maxReplicas": 5}}
CHILDREN: list[tuple[Kind, str]] = [
    (DEPLOYMENT, NAME),
    (SERVICE, NAME),
    (SERVICE, headless_service_name(NAME)),
    (SERVICE_ACCOUNT, NAME),
    (POD_DISRUPTION_BUDGET, NAME),
    (NETWORK_POLICY, NAME),
    (HORIZONTAL_POD_AUTOSCALER, NAME),
]


async def test_a_resource_gets_its_children_and_becomes_ready(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    for kind, name in CHILDREN:
        assert await world.get(kind, name) is not None, f"{kind} {name}"
    assert await world.client.list(JOB, world.namespace) == []
    conditions = await world.conditions()
    assert conditions["Ready"] == ("True", "PodsAvailable")
    assert conditions["Available"][0] == "True"
    assert conditions["Progressing"] == ("False", "RolledOut")
    assert conditions["Degraded"][0] == "False"
    assert conditions["ModelsVerified"] == ("True", "Verified")
    assert conditions["MemoryFits"] == ("True", "Fits")


async def test_the_status_is_that_of_the_generation_and_the_pods(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    body = await world.existing(SPECULATIVE_DEPLOYMENT)
    status = body["status"]
    assert status["observedGeneration"] == body["metadata"]["generation"]
    assert all(c["observedGeneration"] == body["metadata"]["generation"] for c in status["conditions"])
    assert (status["replicas"], status["readyReplicas"], status["pairDigest"]) == (2, 2, DIGEST)
    assert status["memoryPlan"]["requiredBytes"] == 2100
    labels = dict(pair.split("=") for pair in status["selector"].split(","))
    assert labels == (await world.existing(DEPLOYMENT))["spec"]["selector"]["matchLabels"]


async def test_a_second_look_writes_nothing(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    before = await world.existing(DEPLOYMENT)
    await world.look_undisturbed(10)
    after = await world.existing(DEPLOYMENT)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert (
        after["metadata"]["annotations"]["deployment.kubernetes.io/revision"]
        == before["metadata"]["annotations"]["deployment.kubernetes.io/revision"]
    )


SPELLINGS: list[dict[str, Any]] = [
    {
        "serving": {"kvCacheMemory": memory},
        "accelerator": {"memory": accelerator},
        "modelCache": {"emptyDir": {"sizeLimit": memory}},
        "podTemplate": {
            "resources": {
                "requests": {"cpu": cpu, "memory": memory},
                "limits": {"cpu": cpu, "memory": memory},
            },
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": memory}}],
        },
    }
    for cpu, memory, accelerator in [
        ("1", "1536Mi", "80Gi"),
        ("1000m", "1.5Gi", "81920Mi"),
        (1, "1610612736", 85899345920),
        (1.0, "1610612736000m", "85899345920"),
        ("1.0", "1572864Ki", "80.0Gi"),
    ]
]


async def test_another_spelling_of_the_same_quantities_changes_nothing(world: World) -> None:
    source = {"model": {"uri": "hf://org/target", "revision": "a" * 40}}
    await world.create({"target": source, **SPELLINGS[0]})
    await world.settle()
    before = await made_objects(world)
    for spelling in [*SPELLINGS[1:], SPELLINGS[0]]:
        await world.change(spelling)
        _, writes = await world.reconcile()
        assert writes == [("patch/status", "SpeculativeDeployment", NAME)], "it was seen, and that is all"
        await world.look_undisturbed(10)
    assert await made_objects(world) == before


async def test_everything_but_pods_is_there_after_one_look(world: World) -> None:
    await world.create(AUTOSCALED)
    _, writes = await world.reconcile()
    applied = {(kind, name) for verb, kind, name in writes if verb == "apply"}
    assert {(kind.kind, name) for kind, name in CHILDREN if kind != DEPLOYMENT} <= applied
    assert len(await world.client.list(JOB, world.namespace)) == 1
    assert await world.get(DEPLOYMENT) is None, "no pod before the verdict"
    assert (await world.conditions())["Ready"] == ("False", "PreflightPending")


async def test_no_child_and_no_resource_has_a_finalizer(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    for kind, name in [*CHILDREN, (SPECULATIVE_DEPLOYMENT, NAME)]:
        found = await world.existing(kind, name)
        assert "finalizers" not in found["metadata"], kind


async def test_deletion_leaves_nothing(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    await world.client.delete(SPECULATIVE_DEPLOYMENT, world.namespace, NAME)
    outcome, writes = await world.reconcile()
    assert outcome.is_gone
    assert writes == []

    async def is_empty() -> bool:
        found = [await world.get(kind, name) for kind, name in CHILDREN]
        config_maps = await world.client.list(CONFIG_MAP, world.namespace)
        ours = [c for c in config_maps if c["metadata"]["name"] != "kube-root-ca.crt"]
        return not any(found) and not ours and not await world.pods()

    await world.until(is_empty, seconds=30)


async def test_nothing_is_made_for_a_resource_that_is_being_deleted(world: World) -> None:
    await world.create()
    held = {"metadata": {"finalizers": ["example.com/held"]}}
    await world.client.patch(SPECULATIVE_DEPLOYMENT, world.namespace, NAME, held)
    await world.client.delete(SPECULATIVE_DEPLOYMENT, world.namespace, NAME)
    outcome, writes = await world.reconcile()
    assert (outcome.is_gone, writes) == (True, [])
    free: dict[str, Any] = {"metadata": {"finalizers": None}}
    await world.client.patch(SPECULATIVE_DEPLOYMENT, world.namespace, NAME, free)


async def test_a_namesake_made_at_once_gets_children_of_its_own(world: World) -> None:
    await world.create()
    await world.settle()
    old = await world.existing(DEPLOYMENT)
    await world.client.delete(SPECULATIVE_DEPLOYMENT, world.namespace, NAME)
    await world.create()
    await world.settle(seconds=60)

    async def is_replaced() -> bool:
        await world.settle(seconds=60)
        found = await world.get(DEPLOYMENT)
        return found is not None and found["metadata"]["uid"] != old["metadata"]["uid"]

    await world.until(is_replaced, seconds=60)
    await world.settle()
    assert (await world.conditions())["Ready"][0] == "True"


async def test_what_somebody_changes_or_deletes_is_restored(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    await world.client.delete(SERVICE, world.namespace, NAME)
    edit = {"spec": {"maxUnavailable": 3}}
    await world.client.patch(POD_DISRUPTION_BUDGET, world.namespace, NAME, edit)
    await world.settle()
    assert await world.get(SERVICE) is not None
    assert (await world.existing(POD_DISRUPTION_BUDGET))["spec"]["maxUnavailable"] == 1


async def test_what_others_add_stays(world: World) -> None:
    await world.create()
    await world.settle()
    added = {"metadata": {"annotations": {"example.com/note": "x"}, "labels": {"example.com/team": "y"}}}
    await world.client.patch(DEPLOYMENT, world.namespace, NAME, added)
    await world.change({"serving": {"maxQueueLength": 7}})
    await world.settle()
    metadata = (await world.existing(DEPLOYMENT))["metadata"]
    assert metadata["annotations"]["example.com/note"] == "x"
    assert metadata["labels"]["example.com/team"] == "y"


async def test_autoscaling_that_is_not_wanted_any_more_goes_and_replicas_stay(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.scale(4)
    await world.settle()
    await world.change({"autoscaling": None})
    await world.settle()
    assert await world.get(HORIZONTAL_POD_AUTOSCALER) is None
    assert (await world.existing(DEPLOYMENT))["spec"]["replicas"] == 4
    assert (await world.conditions())["AutoscalingActive"] == ("False", "NotConfigured")


async def test_old_configurations_go_when_no_pod_reads_them(world: World) -> None:
    await world.create()
    for length in (10, 20, 30):
        await world.change({"serving": {"maxQueueLength": length}})
        await world.settle()
    names = [c["metadata"]["name"] for c in await world.client.list(CONFIG_MAP, world.namespace)]
    assert len([name for name in names if name.startswith(f"{NAME}-config-")]) == 1


async def test_pods_carry_no_cost_before_any_scale_in(world: World) -> None:
    await world.create({**PAIR, "replicas": 3})
    await world.settle()
    for pod in await world.pods():
        assert POD_DELETION_COST_ANNOTATION not in pod["metadata"].get("annotations", {})
