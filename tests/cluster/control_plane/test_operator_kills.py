"""Killed at any moment, whatever it was doing: the next operator brings everything into the right state."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftline_operator.constants import INSTANCE_LABEL, REVISION_LABEL
from draftline_operator.models.kinds import CONFIG_MAP, DEPLOYMENT, SPECULATIVE_DEPLOYMENT
from draftline_operator.models.names import pair_record_name
from draftline_operator.testing import Killed
from support.made_objects import Made, is_empty, made_objects, split_records
from support.operator_world import World
from support.operators import Operators, wait_until_it_leads
from support.speculative_deployments import AUTOSCALED, PAIR

Step = Callable[[World], Awaitable[None]]
Write = tuple[str, str]
"""Verb and kind."""

each_or_some_writes = pytest.mark.parametrize(
    "every",
    [
        pytest.param(5, id="every fifth write"),
        pytest.param(1, id="each write", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)

# ---------------------------------------------------------------------------------- after each write, in turn


async def start_afresh(world: World) -> None:
    """Nothing is left, nor known of any pair."""
    await world.delete()
    await world.until(lambda: is_empty(world), seconds=60)


async def create(world: World) -> None:
    await world.create(AUTOSCALED)


def changing(**change: Any) -> Step:
    async def step(world: World) -> None:
        await world.change(change)

    return step


def scaling(replicas: int) -> Step:
    async def step(world: World) -> None:
        await world.scale(replicas)

    return step


@dataclass(frozen=True)
class Change:
    there: Step
    back: Step
    writes: frozenset[Write]
    """What it takes, at least."""


STATUS = ("patch/status", "SpeculativeDeployment")
OF_A_PREFLIGHT = frozenset({("apply", "ConfigMap"), ("apply", "Job"), ("delete", "Job"), STATUS})
OF_A_CREATION = OF_A_PREFLIGHT | {
    ("apply", "Deployment"),
    ("apply", "HorizontalPodAutoscaler"),
    ("apply", "NetworkPolicy"),
    ("apply", "PodDisruptionBudget"),
    ("apply", "Service"),
    ("apply", "ServiceAccount"),
    ("delete", "ConfigMap"),
    ("patch", "SpeculativeDeployment"),
}
CHANGES = {
    "configuration": Change(
        changing(serving={"maxQueueLength": 9}),
        changing(serving={"maxQueueLength": 10}),
        frozenset({("apply", "ConfigMap"), ("apply", "Deployment"), ("delete", "ConfigMap"), STATUS}),
    ),
    "pair": Change(
        changing(draft={"model": {"uri": "pvc://models/other-draft"}}),
        changing(draft=PAIR["draft"]),
        OF_A_PREFLIGHT | {("apply", "Deployment"), ("delete", "ConfigMap")},
    ),
    "scale-out": Change(scaling(3), scaling(1), frozenset({("patch", "Deployment"), STATUS})),
    "scale-in": Change(
        scaling(1), scaling(3), frozenset({("patch", "Pod"), ("patch", "Deployment"), STATUS})
    ),
}


@each_or_some_writes
async def test_killed_after_a_write_of_a_creation_it_ends_in_the_right_state(
    world: World, every: int
) -> None:
    kills = Kills(world, start_afresh, create)
    await kills.after_writes(every=every)
    if every == 1:
        await kills.after_all_of(OF_A_CREATION)


@each_or_some_writes
@pytest.mark.parametrize("name", CHANGES)
async def test_killed_after_a_write_of_a_change_it_ends_in_the_right_state(
    world: World, name: str, every: int
) -> None:
    change = CHANGES[name]

    async def go_back(world: World) -> None:
        await change.back(world)
        await world.settle()
        await forget_other_pairs(world)

    await create(world)
    await world.settle()
    kills = Kills(world, go_back, change.there)
    await kills.after_writes(every=every)
    if every == 1:
        await kills.after_all_of(change.writes)


@each_or_some_writes
async def test_killed_after_a_write_and_deleted_it_leaves_nothing(world: World, every: int) -> None:
    """A deletion has no writes of its own: the cluster collects whatever was written before."""
    for after in itertools.count(1, every):
        await create(world)
        was_killed = await dies(world, kill_after=after)
        await world.delete()
        outcome, writes = await world.reconcile()
        assert (outcome.is_gone, writes) == (True, [])
        await world.until(lambda: is_empty(world), seconds=60)
        if not was_killed:
            break
    assert after > 10


@dataclass
class Kills:
    """Acts again and again, and dies at another place each time.

    What is there in the end has always to be what is left where nobody dies.
    """

    world: World
    prepare: Step
    act: Step
    died_after: set[Write] = field(default_factory=set)
    _expected: Made | None = None

    async def after_writes(self, *, every: int) -> None:
        """After the first one, and then each time after so many more, until it comes to rest before."""
        after = 1
        while await self._dies(kill_after=after):
            after += every
        assert after > 1

    async def after_all_of(self, writes: Iterable[Write]) -> None:
        """How many writes tell a status is chance: a count may have passed over others."""
        for write in sorted(set(writes) - self.died_after):
            assert await self._dies(kill_on=write), f"there is no {write}"

    async def _dies(self, **kill: Any) -> bool:
        """Whether it did; if so, all has become as it should be."""
        if self._expected is None:
            await self.prepare(self.world)
            await self.act(self.world)
            await self.world.settle()
            self._expected = await made_objects(self.world)
        await self.prepare(self.world)
        await self.act(self.world)
        if not await dies(self.world, **kill):
            return False
        verb, kind, name = self.world.writes[-1]
        self.died_after.add((verb, kind))
        await self.world.settle()
        assert await made_objects(self.world) == self._expected, f"{kill}: died after {verb} {kind} {name}"
        return True


async def dies(world: World, **kill: Any) -> bool:
    """Once; False where it comes to rest before."""
    try:
        await world.settle(**kill)
    except Killed:
        return True
    return False


async def forget_other_pairs(world: World) -> None:
    """That they were checked."""
    template = (await world.existing(DEPLOYMENT))["spec"]["template"]
    kept = pair_record_name(template["metadata"]["labels"][REVISION_LABEL])
    for found in await world.client.list(CONFIG_MAP, world.namespace):
        name = found["metadata"]["name"]
        if name.startswith(pair_record_name("")) and name != kept:
            await world.client.delete(CONFIG_MAP, world.namespace, name)


# ------------------------------------------------------------------------------------------ at random moments

ACTIONS = ("create", "update", "scale", "delete")


@dataclass
class Crowd:
    """Resources that come, change and go, each with a pair of its own."""

    world: World
    generator: random.Random
    living: list[str] = field(default_factory=list)
    _count: int = 0

    async def act(self, action: str) -> None:
        self._count += 1
        match action:
            case "create":
                await self.create()
            case "update":
                await self.world.change(self._change(), name=self._any())
            case "scale":
                await self.world.scale(self.generator.randint(1, 4), name=self._any())
            case "delete":
                name = self.living.pop(self.generator.randrange(len(self.living)))
                await self.world.delete(name=name)

    async def create(self) -> None:
        name = f"chat-{self._count}-{len(self.living)}"
        draft = {"model": {"uri": f"pvc://models/draft-of-{name}"}}
        await self.world.create({**AUTOSCALED, "draft": draft}, name=name)
        self.living.append(name)

    def _change(self) -> dict[str, Any]:
        """Of the configuration, or of the pair."""
        if self.generator.random() < 0.5:
            return {"serving": {"maxQueueLength": 10 + self._count}}
        return {"draft": {"model": {"uri": f"pvc://models/draft-{self._count}"}}}

    def _any(self) -> str:
        return self.generator.choice(self.living)


def shuffled_actions(number: int, generator: random.Random) -> list[str]:
    """As many of each kind, and never two of a kind before all others had their turn."""
    rounds = [generator.sample(ACTIONS, len(ACTIONS)) for _ in range(-(-number // len(ACTIONS)))]
    return list(itertools.chain(*rounds))[:number]


@pytest.mark.usefixtures("kubelet_runs")
@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_killed_at_random_moments_it_ends_in_the_right_state(
    world: World, twin: World, operators: Operators, kills: int
) -> None:
    """Moments of creations, updates, scalings and deletions, while it leads and has something to do."""
    generator = random.Random(4)
    crowd = Crowd(world, generator)
    for _ in range(3):
        await crowd.create()
    for number, action in enumerate(shuffled_actions(kills, generator)):
        with operators.start(f"killed-{number}") as operator:
            await wait_until_it_leads(operator)
            await asyncio.sleep(generator.uniform(0, 0.5))
            await crowd.act(action)
            await asyncio.sleep(generator.uniform(0, 1.5))
            operator.kill()
        await operators.expire_lease()
    num_busy = sum(bool(operators.writes(f"killed-{number}")) for number in range(kills))
    print(f"{num_busy} of {kills} had written when they were killed")
    assert num_busy >= kills / 2
    namespaces = f"{world.namespace},{twin.namespace}"
    with operators.start("last", watch_namespaces=namespaces):
        await assert_comes_to_what_it_would_have_been(crowd, twin)


async def assert_comes_to_what_it_would_have_been(crowd: Crowd, twin: World) -> None:
    """Had the living been created just as they are now, and nothing else."""
    world = crowd.world
    for name in crowd.living:
        await world.until(lambda name=name: world.is_ready(name), seconds=60)  # type: ignore[misc]
        spec = (await world.existing(SPECULATIVE_DEPLOYMENT, name))["spec"]
        await twin.create(spec, name=name)
    async with twin.kubelet.running():
        for name in crowd.living:
            await twin.until(lambda name=name: twin.is_ready(name), seconds=60)  # type: ignore[misc]
        for _ in range(100):  # until pods of old revisions are gone, and what only they used
            records, found = split_records(await made_objects(world))
            expected_records, expected = split_records(await made_objects(twin))
            if found == expected:
                break
            await asyncio.sleep(0.2)
    assert found == expected
    assert records.keys() >= expected_records.keys()
    owners = {owner["name"] for record in records.values() for owner in record["owners"]}
    assert owners <= set(crowd.living)
    assert {pod["metadata"]["labels"][INSTANCE_LABEL] for pod in await world.pods()} == set(crowd.living)
