"""Which events bring a resource into the queue, and how soon."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.constants import INSTANCE_LABEL, OUR_LABELS
from draftline_operator.handlers.registry import CHILDREN, SETTLING_SECONDS, News, on_child, on_resource
from draftline_operator.models.kinds import CONFIG_MAP, DEPLOYMENT, JOB, POD, SPECULATIVE_DEPLOYMENT, Kind
from draftline_operator.services.worker import MIN_INTERVAL_SECONDS, Key, WorkQueue

NAMESPACE, NAME = "models", "chat"
KEY: Key = (NAMESPACE, NAME)


class Watched:
    """The handlers of one queue, at a time of our own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue = WorkQueue(lambda: self.now)
        self._news = News(ObjectMemory([SPECULATIVE_DEPLOYMENT, *CHILDREN]))
        self._version = 0

    async def hear(self, kind: Kind, event: str = "MODIFIED", *, of: str | None = NAME, **body: Any) -> None:
        """Of an object that is never twice the same."""
        self._version += 1
        labels = OUR_LABELS | ({INSTANCE_LABEL: of} if of is not None else {})
        metadata = {
            "namespace": NAMESPACE,
            "name": NAME,
            "uid": f"uid-of-{kind.kind}",
            "labels": labels,
            "resourceVersion": str(self._version),
            "generation": self._version,
        }
        told = {"type": event, "object": {"kind": kind.kind, "metadata": metadata, **body}}
        is_resource = kind == SPECULATIVE_DEPLOYMENT
        handler: Any = on_resource(self.queue, self._news) if is_resource else self._on_child(kind)
        await handler(event=told, namespace=NAMESPACE, name=NAME, labels=labels)

    def _on_child(self, kind: Kind) -> Any:
        return on_child(self.queue, self._news, kind)

    async def looks_until(self, seconds: float) -> list[float]:
        """When the resource is reconciled, in no time at all."""
        looks = []
        while self.now <= seconds:
            if await _take(self.queue) is not None:
                looks.append(self.now)
                self.queue.give_back(KEY)
            self.now = round(self.now + MIN_INTERVAL_SECONDS, 6)
        return looks


async def _take(queue: WorkQueue) -> Key | None:
    try:
        async with asyncio.timeout(0.005):
            return await queue.take()
    except TimeoutError:
        return None


@pytest.mark.parametrize("kind", [SPECULATIVE_DEPLOYMENT, JOB])
async def test_what_somebody_waits_for_is_looked_at_at_once(kind: Kind) -> None:
    watched = Watched()
    await watched.hear(kind)
    assert await watched.looks_until(0.0) == [0.0]


async def test_events_of_children_within_a_second_are_one_look() -> None:
    watched = Watched()
    for kind in (CONFIG_MAP, DEPLOYMENT, POD, DEPLOYMENT, POD, POD):
        await watched.hear(kind)
    assert await watched.looks_until(0.5) == []
    await watched.hear(POD)
    assert await watched.looks_until(5.0) == [SETTLING_SECONDS]


async def test_events_without_end_do_not_put_a_look_off() -> None:
    watched, looks = Watched(), []
    while watched.now < 5.0:
        await watched.hear(POD)
        looks += await watched.looks_until(watched.now)
    assert looks[0] == SETTLING_SECONDS
    assert all(later - sooner <= 2 * SETTLING_SECONDS for sooner, later in itertools.pairwise(looks))


async def test_a_change_of_the_resource_does_not_wait_for_its_children() -> None:
    watched = Watched()
    await watched.hear(POD)
    assert await watched.looks_until(0.25) == []
    await watched.hear(SPECULATIVE_DEPLOYMENT)
    assert await watched.looks_until(5.0) == [0.5], "and what the children told is seen with it"


async def test_the_verdict_on_a_pair_is_told_to_its_namespace_at_once() -> None:
    watched = Watched()
    watched.queue.add(KEY)
    await watched.looks_until(1.0)
    await watched.hear(CONFIG_MAP, of=None, data={"result": "{}"})
    assert len(watched.queue) == 1
    assert await _take(watched.queue) == KEY


async def test_what_is_no_news_brings_nobody() -> None:
    watched = Watched()
    await watched.hear(CONFIG_MAP, data={"a": "1"})
    assert await watched.looks_until(2.0) == [SETTLING_SECONDS]
    await watched.hear(CONFIG_MAP, data={"a": "1"})
    assert len(watched.queue) == 0
