"""At rest nothing is written, however often it is looked at, and however much the pods tell."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from draftline_operator.constants import ADMIN_PORT
from draftline_operator.models.kinds import SERVICE
from support.answering_pods import ACCEPTANCE, answering_pods
from support.operator_world import NAME, World
from support.operators import Operators
from support.speculative_deployments import AUTOSCALED

ON_THE_NODES_DISK: dict[str, Any] = {"target": {"model": {"uri": "file:///models/target"}}}
"""Which is not allowed."""
NAMES = ("chat", "invalid")
OFTEN = {"resync_seconds": 1, "figures_seconds": 1, "scrape_seconds": 1}
AS_INSTALLED = {"resync_seconds": 120}
"""Figures every 30 s, scrapes every 3 s; only the periodic look comes more often, so that there are two."""


def loopback_address() -> str:
    """One that nobody else listens at."""
    return ".".join(["127", *(str(random.randint(1, 254)) for _ in range(3))])


async def misses_its_metric(world: World) -> bool:
    """The last that the autoscaler has to say: it takes its time to learn of the kind that it scales."""
    conditions = (await world.status()).get("conditions", [])
    return any("FailedGetObjectMetric" in condition["message"] for condition in conditions)


async def has_figures(world: World) -> bool:
    return (await world.status()).get("acceptanceRate") == ACCEPTANCE


@pytest.mark.parametrize(
    ("seconds", "flags"),
    [
        pytest.param(15, OFTEN, id="15 s of a look a second"),
        pytest.param(
            300, AS_INSTALLED, id="5 min as installed", marks=[pytest.mark.slow, pytest.mark.timeout(600)]
        ),
    ],
)
async def test_at_rest_nothing_is_written(
    world: World, operators: Operators, seconds: int, flags: dict[str, Any]
) -> None:
    world.kubelet.address = loopback_address()
    async with answering_pods(world.kubelet.address, ADMIN_PORT), world.kubelet.running():
        with operators.start(**flags) as operator:
            await world.create(AUTOSCALED)
            await world.create(ON_THE_NODES_DISK, name="invalid")
            await world.until(world.is_ready, seconds=30)
            await world.until(lambda: misses_its_metric(world), seconds=60)
            await world.until(lambda: has_figures(world), seconds=60)
            await asyncio.sleep(2)
            writes, looks = operators.writes(), await asyncio.to_thread(operator.reconciles)
            statuses = [await world.status(name) for name in NAMES]
            await asyncio.sleep(seconds)
            assert operators.writes()[len(writes) :] == []
            assert [await world.status(name) for name in NAMES] == statuses
            assert await asyncio.to_thread(operator.reconciles) >= looks + 2 * len(NAMES)
    assert statuses[0]["queueDepth"] == 0
    assert [c["reason"] for c in statuses[1]["conditions"] if c["type"] == "Ready"] == ["InvalidSpec"]


async def test_a_look_that_finds_nothing_to_do_asks_only_for_what_no_watch_tells(
    world: World, operators: Operators
) -> None:
    """Which is who else scales its pods. Pods are listed to be scraped, resources for their figures."""
    async with world.kubelet.running():
        with operators.start() as operator:
            await world.create(AUTOSCALED)
            await world.until(world.is_ready, seconds=30)
            await world.until(lambda: misses_its_metric(world), seconds=60)
            await asyncio.sleep(2)
            reads, looks = operators.reads(), await asyncio.to_thread(operator.reconciles)

            async def has_looked() -> bool:
                return await asyncio.to_thread(operator.reconciles) > looks

            note = {"metadata": {"annotations": {"example.com/note": "of no concern"}}}
            await world.client.patch(SERVICE, world.namespace, NAME, note)
            await world.until(has_looked, seconds=10)
            await asyncio.sleep(1)
            asked = {str(read) for read in operators.reads()[len(reads) :]}
    elsewhere = {"list pods ", "list speculativedeployments "}
    assert asked - elsewhere == {"list horizontalpodautoscalers "}
