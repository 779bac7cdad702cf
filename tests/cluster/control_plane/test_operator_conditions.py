"""What the API server says of a resource is true at every moment of a rollout, a crash and a quiet change."""

from __future__ import annotations

from typing import Any

from draftline_operator.models.kinds import DEPLOYMENT, SPECULATIVE_DEPLOYMENT
from support.operator_world import World
from support.speculative_deployments import AUTOSCALED, PAIR


async def condition(world: World, kind: str) -> dict[str, Any]:
    (found,) = [c for c in (await world.status())["conditions"] if c["type"] == kind]
    return dict(found)


async def test_ready_stays_true_through_a_rollout_and_only_progressing_changes(world: World) -> None:
    await world.create({**PAIR, "replicas": 3})
    await world.settle()
    before = {kind: await condition(world, kind) for kind in ("Ready", "Available")}
    await world.change({"image": "registry.test/server:2"})
    progress = []
    for _ in range(30):
        await world.reconcile()
        conditions = await world.conditions()
        assert conditions["Ready"] == ("True", "PodsAvailable")
        assert conditions["Available"][0] == "True"
        assert conditions["Degraded"][0] == "False"
        progress.append(conditions["Progressing"])
        await world.kubelet.step()
    assert progress[0] == ("True", "VerifyingModels")
    assert {status for status, reason in progress if reason != "VerifyingModels"} == {"True", "False"}
    assert progress[-1] == ("False", "RolledOut")
    for kind, found in before.items():
        assert (await condition(world, kind))["lastTransitionTime"] == found["lastTransitionTime"]


async def test_pods_that_crash_after_they_were_ready_make_it_not_ready_until_they_serve_again(
    world: World,
) -> None:
    await world.create({**PAIR, "replicas": 2})
    await world.settle()
    assert await world.is_ready()
    world.kubelet.crashing = "registry.test/server:1"
    await world.settle()
    conditions = await world.conditions()
    assert conditions["Ready"] == ("False", "CrashLoopBackOff")
    assert conditions["Available"] == ("False", "NoPodsAvailable")
    assert conditions["Degraded"] == ("True", "CrashLoopBackOff")
    body = await world.existing(SPECULATIVE_DEPLOYMENT)
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"]
    assert body["status"]["readyReplicas"] == 0
    world.kubelet.crashing = None
    await world.settle()
    assert await world.is_ready()


async def test_a_change_that_rolls_nothing_out_is_told_to_have_been_seen(world: World) -> None:
    await world.create(AUTOSCALED)
    await world.settle()
    before = await world.existing(DEPLOYMENT)
    await world.change({"autoscaling": {"maxReplicas": 6}})
    assert not await world.is_ready(), "the status is of the spec as it was"
    await world.settle()
    assert await world.is_ready()
    assert (await world.existing(DEPLOYMENT))["metadata"]["generation"] == before["metadata"]["generation"]
