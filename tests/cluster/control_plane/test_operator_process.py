"""The process: it acts on events, alone of its kind, and may be stopped, frozen or killed at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import urllib.error
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from draftline_operator.models.kinds import DEPLOYMENT, LEASE, SERVICE, SPECULATIVE_DEPLOYMENT
from draftline_operator.testing import Killed
from support.kube.local import LocalCluster
from support.operator_process import OperatorProcess, running_operator
from support.operator_world import NAME, World
from support.speculative_deployments import PAIR

LEASE_NAME = "draftline-operator"
AUTOSCALED: dict[str, Any] = {**PAIR, "autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
WRITES = frozenset({"create", "update", "patch", "delete"})


@pytest.fixture
async def kubelet_runs(world: World) -> AsyncIterator[None]:
    """All the time, beside the operator."""
    async with world.kubelet.running():
        yield


@pytest.fixture
def start(control_plane: LocalCluster, world: World, tmp_path: Path) -> Callable[..., Any]:
    """Starts an operator under a user name of its own, by which the audit log knows it."""

    def started(name: str = "operator", **flags: Any) -> Any:
        user = f"{name}-{world.namespace}"
        kubeconfig = control_plane.kubeconfig_for(user, ["system:masters"])
        return running_operator(kubeconfig, world.namespace, tmp_path / f"{name}.log", **flags)

    return started


def writes_of(control_plane: LocalCluster, world: World, name: str = "operator") -> list[str]:
    """Verb and object of what the audit log has of an operator's writes, its Lease aside."""
    found = []
    for line in control_plane.audit_log.read_text().splitlines():
        event = json.loads(line)
        what = event.get("objectRef") or {}
        is_ours = event["user"]["username"] == f"{name}-{world.namespace}"
        if is_ours and event["verb"] in WRITES and what.get("resource") != "leases":
            found.append(f"{event['verb']} {what.get('resource')}/{what.get('subresource', '')}")
    return found


async def is_ready(world: World, name: str = NAME) -> bool:
    body = await world.existing(SPECULATIVE_DEPLOYMENT, name)
    status = body.get("status") or {}
    ready = [c for c in status.get("conditions", []) if c["type"] == "Ready" and c["status"] == "True"]
    return bool(ready) and status["observedGeneration"] == body["metadata"]["generation"]


async def misses_its_metric(world: World) -> bool:
    """The last that the autoscaler has to say: it takes its time to learn of the kind that it scales."""
    conditions = (await world.status()).get("conditions", [])
    return any("FailedGetObjectMetric" in condition["message"] for condition in conditions)


async def answers(operator: OperatorProcess, path: str) -> bool:
    with contextlib.suppress(urllib.error.HTTPError):
        return await asyncio.to_thread(operator.fetch, path) == "ok\n"
    return False


async def wait_for_log(operator: OperatorProcess, message: str) -> dict[str, Any]:
    return await asyncio.to_thread(operator.wait_for, message)


@pytest.mark.usefixtures("kubelet_runs")
async def test_it_brings_a_resource_up_and_ends_when_it_is_told_to(
    world: World, start: Callable[..., Any]
) -> None:
    with start() as operator:
        await world.create(AUTOSCALED)
        await world.until(lambda: is_ready(world), seconds=30)
        assert await asyncio.to_thread(operator.fetch, "/healthz") == "ok\n"
        assert await asyncio.to_thread(operator.fetch, "/readyz") == "ok\n"
        assert await asyncio.to_thread(operator.stop) == 0
    lease = await world.existing(LEASE, LEASE_NAME)
    assert lease["spec"]["holderIdentity"] == "", "the next one need not wait"


@pytest.mark.usefixtures("kubelet_runs")
async def test_what_happens_to_a_child_is_seen_at_once(world: World, start: Callable[..., Any]) -> None:
    with start():
        await world.create()
        await world.until(lambda: is_ready(world), seconds=30)
        await world.client.delete(SERVICE, world.namespace, NAME)

        async def is_back() -> bool:
            return await world.get(SERVICE) is not None

        await world.until(is_back, seconds=5)


@pytest.mark.usefixtures("kubelet_runs")
async def test_a_spec_that_is_put_right_is_picked_up_without_a_restart(
    world: World, start: Callable[..., Any]
) -> None:
    with start():
        await world.create({"target": {"model": {"uri": "file:///models/target"}}})

        async def is_invalid() -> bool:
            return (await world.conditions()).get("Ready") == ("False", "InvalidSpec")

        await world.until(is_invalid, seconds=30)
        await world.change({"target": {"model": {"uri": "pvc://models/target"}}})
        await world.until(lambda: is_ready(world), seconds=30)


@pytest.mark.usefixtures("kubelet_runs")
async def test_at_rest_nothing_is_written(
    world: World, start: Callable[..., Any], control_plane: LocalCluster
) -> None:
    with start(resync_seconds=1):
        await world.create(AUTOSCALED)
        await world.create({"target": {"model": {"uri": "file:///models/target"}}}, name="invalid")
        await world.until(lambda: is_ready(world), seconds=30)
        await world.until(lambda: misses_its_metric(world), seconds=60)
        await asyncio.sleep(2)
        before = writes_of(control_plane, world)
        await asyncio.sleep(10)
        assert writes_of(control_plane, world)[len(before) :] == []


@pytest.mark.usefixtures("kubelet_runs")
async def test_a_restart_rolls_nothing(world: World, start: Callable[..., Any]) -> None:
    names = [f"chat-{number}" for number in range(5)]
    for name in names:
        await world.create(name=name)
    with start() as operator:
        for name in names:
            await world.until(lambda name=name: is_ready(world, name), seconds=60)  # type: ignore[misc]
        await asyncio.to_thread(operator.stop)
    before = [(await world.existing(DEPLOYMENT, name))["metadata"] for name in names]
    for number in range(3):
        with start(f"again-{number}") as operator:
            await wait_for_log(operator, "became the leader")
            await asyncio.sleep(3)
            assert await asyncio.to_thread(operator.writes) == 0
            await asyncio.to_thread(operator.stop)
    after = [(await world.existing(DEPLOYMENT, name))["metadata"] for name in names]
    assert [m["generation"] for m in after] == [m["generation"] for m in before]


@pytest.mark.usefixtures("kubelet_runs")
async def test_of_two_operators_one_acts_and_the_other_takes_over_when_it_is_killed(
    world: World, start: Callable[..., Any], control_plane: LocalCluster
) -> None:
    with start("first") as first:
        await wait_for_log(first, "became the leader")
        with start("second") as second:
            await world.create()
            await world.until(lambda: is_ready(world), seconds=30)
            assert writes_of(control_plane, world, "second") == []
            await world.until(lambda: answers(second, "/readyz"))
            first.kill()
            await world.create(name="later")
            await world.until(lambda: is_ready(world, "later"), seconds=30)


@pytest.mark.usefixtures("kubelet_runs")
async def test_an_operator_that_was_asleep_writes_nothing_when_it_wakes(
    world: World, start: Callable[..., Any], control_plane: LocalCluster
) -> None:
    with start("first", pod_name="first") as first, start("second", pod_name="second") as second:
        leader, name = await leader_of(world, first=first, second=second)
        await world.create()
        await world.until(lambda: is_ready(world), seconds=30)
        leader.process.send_signal(signal.SIGSTOP)
        before = len(writes_of(control_plane, world, name))
        await world.change({"serving": {"maxQueueLength": 9}})
        await world.until(lambda: is_ready(world), seconds=30)
        leader.process.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(leader.process.wait, 30) == 1, "it ends, to start again as a standby"
        assert len(writes_of(control_plane, world, name)) == before


async def leader_of(world: World, **operators: OperatorProcess) -> tuple[OperatorProcess, str]:
    """Once anybody leads."""
    for _ in range(200):
        lease = await world.get(LEASE, LEASE_NAME)
        holder = lease["spec"].get("holderIdentity", "") if lease is not None else ""
        for name, operator in operators.items():
            if holder.startswith(f"{name}_"):
                return operator, name
        await asyncio.sleep(0.1)
    raise AssertionError("nobody leads")


async def test_killed_after_any_of_its_writes_it_ends_in_the_right_state(world: World) -> None:
    """Each write of bringing a resource up and of changing it, in turn."""
    await world.create(AUTOSCALED, name="undisturbed")
    await world.settle("undisturbed")
    await world.change({"serving": {"maxQueueLength": 9}}, name="undisturbed")
    await world.settle("undisturbed")
    expected = await children(world, "undisturbed")
    kills = 0
    for after in range(1, 40):
        name = f"killed-{after}"
        await world.create(AUTOSCALED, name=name)
        was_killed = await settle_with_one_kill(world, name, after)
        await world.change({"serving": {"maxQueueLength": 9}}, name=name)
        await world.settle(name)
        assert await children(world, name) == expected, f"killed after write {after}"
        await world.client.delete(SPECULATIVE_DEPLOYMENT, world.namespace, name)
        if not was_killed:
            break
        kills += 1
    assert kills >= 10


async def settle_with_one_kill(world: World, name: str, after: int) -> bool:
    """Dies once, after so many writes; False where there were not so many."""
    left = after
    for _ in range(60):
        try:
            _, writes = await world.reconcile(name, kill_after=left)
            left -= len(writes)
        except Killed:
            await world.settle(name)
            return True
        await world.kubelet.step()
        await asyncio.sleep(0.05)
    return False


async def children(world: World, name: str) -> dict[str, Any]:
    """What of the children does not depend on the resource's name."""
    deployment = await world.existing(DEPLOYMENT, name)
    spec = deployment["spec"]
    service = await world.existing(SERVICE, name)
    return {
        "replicas": spec["replicas"],
        "revision": spec["template"]["metadata"]["labels"]["draftline.dev/revision"],
        "strategy": spec["strategy"],
        "ports": [port["port"] for port in service["spec"]["ports"]],
        "conditions": {
            kind: found
            for kind, found in (await world.conditions(name)).items()
            if kind != "AutoscalingActive"
        },
    }


@pytest.mark.usefixtures("kubelet_runs")
@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_killed_at_random_moments_it_ends_in_the_right_state(
    world: World, start: Callable[..., Any], kills: int
) -> None:
    generator = random.Random(4)
    await world.create(AUTOSCALED)
    for number in range(kills):
        with start(f"killed-{number}") as operator:
            await asyncio.sleep(generator.uniform(0.8, 4.0))
            await world.change({"serving": {"maxQueueLength": 10 + number}})
            await world.scale(generator.randint(1, 4))
            await asyncio.sleep(generator.uniform(0, 1.0))
            operator.kill()
    await world.scale(3)
    with start("last"):
        await world.until(lambda: is_ready(world), seconds=60)
        deployment = await world.existing(DEPLOYMENT)
        assert deployment["spec"]["replicas"] == 3


@pytest.mark.usefixtures("kubelet_runs")
@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.slow)])
async def test_what_happened_while_the_api_server_was_away_is_not_lost(
    world: World, start: Callable[..., Any], control_plane: LocalCluster, seconds: int
) -> None:
    await world.create()
    with start("before"):
        await world.until(lambda: is_ready(world), seconds=30)
    with start("during") as operator:
        await wait_for_log(operator, "became the leader")
        await asyncio.to_thread(control_plane.kill, "kube-apiserver")
        code = await asyncio.to_thread(operator.process.wait, 30)
        assert code == 1, "without a renewal it stops acting"
        with start("waiting") as waiting:
            await asyncio.sleep(seconds)
            assert waiting.process.poll() is None, "it waits for the cluster"
            await asyncio.to_thread(control_plane.start, "kube-apiserver")
            await world.change({"replicas": 2})
            await world.until(lambda: is_ready(world), seconds=60)
            assert (await world.status())["readyReplicas"] == 2
