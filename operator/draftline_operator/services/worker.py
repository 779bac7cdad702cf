"""The queue of resources that somebody has seen change, and the tasks that reconcile them.

A resource is in the queue once, however often it is put in, and is reconciled by one task at a time; what
comes in the meantime makes it run once more. Failures are retried ever more seldom, each resource by itself,
so that a broken one never holds up the others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from draftline_operator.errors import ClusterError, OperatorError
from draftline_operator.log import log_event
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.services.reconcile import Outcome

FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 30.0
MIN_INTERVAL_SECONDS: Final = 0.25
"""Between two reconciles of a resource: a burst of events of its children is one."""

Key = tuple[str, str]
"""Namespace and name of a resource."""
Reconcile = Callable[[str, str, int], Awaitable[Outcome]]
"""Of a namespace and a name, after so many failures in a row."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """Of a resource that waits, runs, or has failed of late."""

    due: float | None = None
    """When it is to run next; None: not at all."""
    not_before: float = 0.0
    is_running: bool = False
    failures: int = 0


@dataclass(slots=True)
class WorkQueue:
    """Resources by the time at which they are due. Lives in one event loop."""

    clock: Callable[[], float]
    _entries: dict[Key, _Entry] = field(default_factory=dict)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list)
    _counter: itertools.count[int] = field(default_factory=itertools.count)
    _has_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return sum(entry.due is not None for entry in self._entries.values())

    def add(self, key: Key, *, after: float = 0.0) -> None:
        """Due after so many seconds; one that is due sooner stays so."""
        entry = self._entries.setdefault(key, _Entry())
        due = max(self.clock() + after, entry.not_before)
        if entry.due is not None and entry.due <= due:
            return
        entry.due = due
        heapq.heappush(self._heap, (due, next(self._counter), key))
        self._has_changed.set()

    def add_namespace(self, namespace: str) -> None:
        """All of a namespace that were ever here."""
        for key in [key for key in self._entries if key[0] == namespace]:
            self.add(key)

    async def take(self) -> Key:
        """Waits for one that is due; it is not taken again before it was given back."""
        while True:
            self._has_changed.clear()
            key = self._pop()
            if key is not None:
                return key
            wait = self._heap[0][0] - self.clock() if self._heap else None
            try:
                await asyncio.wait_for(self._has_changed.wait(), wait)
            except TimeoutError:
                continue

    def failures_of(self, key: Key) -> int:
        """In a row, up to now."""
        return self._entries[key].failures

    def give_back(self, key: Key, *, requeue_after: float | None = None, is_gone: bool = False) -> None:
        """After a reconcile that came to its end."""
        entry = self._entries[key]
        entry.failures = 0
        self._release(key, entry)
        if requeue_after is not None:
            self.add(key, after=requeue_after)
        elif entry.due is None and is_gone:
            del self._entries[key]

    def give_back_failed(self, key: Key) -> float:
        """After one that failed; returns the seconds until its retry."""
        entry = self._entries[key]
        doubled = FIRST_RETRY_SECONDS * 2.0**entry.failures
        wait: float = min(doubled, LAST_RETRY_SECONDS) * random.uniform(0.8, 1.2)
        entry.failures = min(entry.failures + 1, 16)
        entry.due = None  # events must not make a failing one hot
        self._release(key, entry)
        entry.not_before = self.clock() + wait
        self.add(key)
        return wait

    def _release(self, key: Key, entry: _Entry) -> None:
        entry.is_running = False
        entry.not_before = self.clock() + MIN_INTERVAL_SECONDS
        if entry.due is not None:  # it came again while it ran
            entry.due = max(entry.due, entry.not_before)
            heapq.heappush(self._heap, (entry.due, next(self._counter), key))
            self._has_changed.set()

    def _pop(self) -> Key | None:
        now = self.clock()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.due != due or entry.is_running:
                continue  # superseded, or to be pushed again when it is given back
            entry.due, entry.is_running = None, True
            return key
        return None


async def work(queue: WorkQueue, reconcile: Reconcile, metrics: OperatorMetrics, *, tasks: int) -> None:
    """Reconciles what is due until it is cancelled."""
    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(_work(queue, reconcile, metrics))


async def _work(queue: WorkQueue, reconcile: Reconcile, metrics: OperatorMetrics) -> None:
    while True:
        key = await queue.take()
        metrics.queue_length.set(len(queue))
        with metrics.reconcile_seconds.time():
            outcome = await _attempt(key, queue, reconcile)
        metrics.reconciles.labels(outcome).inc()


async def _attempt(key: Key, queue: WorkQueue, reconcile: Reconcile) -> str:
    namespace, name = key
    try:
        outcome = await reconcile(namespace, name, queue.failures_of(key))
    except OperatorError as error:
        wait = queue.give_back_failed(key)
        level = logging.INFO if isinstance(error, ClusterError) else logging.WARNING
        log_event(
            _logger,
            level,
            "reconcile failed",
            namespace=namespace,
            resource=name,
            error=str(error),
            retry_in=wait,
        )
        return type(error).__name__
    except Exception as error:  # of ours: told, counted, and kept to this one resource
        wait = queue.give_back_failed(key)
        log_event(
            _logger,
            logging.ERROR,
            "reconcile failed",
            exc_info=error,
            namespace=namespace,
            resource=name,
            retry_in=wait,
        )
        return "bug"
    queue.give_back(key, requeue_after=outcome.requeue_after, is_gone=outcome.is_gone)
    return "ok"


def add_all(queue: WorkQueue, keys: Iterable[Key], *, over: float) -> None:
    """Spread over so many seconds, that a periodic look is no burst."""
    for key in keys:
        queue.add(key, after=random.uniform(0, over))
