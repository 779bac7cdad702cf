"""A resource that is deleted in the middle of something is gone, and a namesake starts afresh."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from draftline_operator.models.kinds import DEPLOYMENT, JOB
from support.kubelet import FITS
from support.made_objects import is_empty
from support.operator_world import World
from support.speculative_deployments import PAIR

GONE_SECONDS = 60

FETCH_FAILED: dict[str, Any] = {"error": {"reason": "FetchFailed", "message": "the hub is away"}}


async def while_the_pair_is_checked(world: World) -> None:
    world.kubelet.is_preflight_held = True
    await world.create()
    await world.settle()
    assert len(await world.client.list(JOB, world.namespace)) == 1


async def while_it_is_rolled_out(world: World) -> None:
    await world.create({**PAIR, "replicas": 2})
    await world.settle()
    await world.change({"serving": {"maxQueueLength": 7}})
    await world.reconcile()
    assert (await world.conditions())["Progressing"][0] == "True"


async def while_a_check_waits_to_be_repeated(world: World) -> None:
    world.kubelet.preflight = FETCH_FAILED
    await world.create()
    await world.settle()
    outcome, _ = await world.reconcile()
    assert outcome.requeue_after is not None
    assert (await world.conditions())["Ready"] == ("False", "FetchFailed")


async def while_the_api_server_refuses_a_child_again_and_again(world: World) -> None:
    toleration = {"key": "a", "operator": "Sometimes"}
    await world.create({**PAIR, "podTemplate": {"tolerations": [toleration]}})
    outcome, _ = await world.reconcile()
    assert outcome.requeue_after is not None
    assert (await world.conditions())["Ready"] == ("False", "Rejected")


async def when_its_children_are_gone_already(world: World) -> None:
    await world.create()
    await world.settle()
    await world.client.delete(DEPLOYMENT, world.namespace, "chat")


MOMENTS = [
    while_the_pair_is_checked,
    while_it_is_rolled_out,
    while_a_check_waits_to_be_repeated,
    while_the_api_server_refuses_a_child_again_and_again,
    when_its_children_are_gone_already,
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
async def test_deleted_in_the_middle_it_is_gone_and_a_namesake_starts_afresh(
    world: World, moment: Callable[[World], Awaitable[None]]
) -> None:
    await moment(world)
    await world.delete()
    outcome, writes = await world.reconcile()
    assert (outcome.is_gone, writes) == (True, [])
    world.kubelet.is_preflight_held, world.kubelet.preflight = False, FITS
    await world.create()

    async def serves() -> bool:
        """Once what the deleted one left has been collected."""
        await world.settle(seconds=60)
        return await world.is_ready()

    await world.until(serves, seconds=GONE_SECONDS)
    await world.delete()
    await world.until(lambda: is_empty(world), seconds=GONE_SECONDS)
