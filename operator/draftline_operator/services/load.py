"""What serving pods are doing, asked of them every few seconds; on every replica of the operator.

of(namespace, name)        totals of a resource, for the autoscaler
refresh(namespace, pods)   of single pods, at this moment, for the choice of those that leave
figures(namespace, name)   for the status
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from draftline_operator.cluster.interface import Cluster
from draftline_operator.cluster.observe import selector
from draftline_operator.constants import INSTANCE_LABEL, SERVING
from draftline_operator.errors import OperatorError
from draftline_operator.log import log_event
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.models.kinds import POD
from draftline_operator.models.load import LiveFigures, PodSample, ResourceLoad
from draftline_operator.models.observed import Object, is_alive
from draftline_operator.planning.deletion_cost import is_ready
from draftline_operator.planning.load import live_figures, total_load
from draftline_operator.services.resync import scopes
from draftline_operator.services.worker import Key

FRESH_SECONDS: Final = 15.0
"""A pod that has not answered for longer is taken for the average of the others."""
_LAST_RETRY_SECONDS: Final = 5.0
"""Of a pod that does not answer: well below the above, or one that answers again would long stay unknown."""

_logger = logging.getLogger(__name__)


class Scraper(Protocol):
    async def scrape(self, address: str) -> PodSample: ...


@dataclass(slots=True)
class _Pod:
    """A pod that is ready and not leaving."""

    key: Key
    address: str
    first: PodSample | None = None
    """The first one: counters of a pod that was there before us are those of a long life."""
    sample: PodSample | None = None
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class _Counters:
    """Token counters of a resource's pods at the time of its last figures, by pod."""

    drafted: dict[str, float] = field(default_factory=dict)
    accepted: dict[str, float] = field(default_factory=dict)


class LoadCache:
    """Filled by `run`; everything else only reads."""

    def __init__(
        self,
        cluster: Cluster,
        scraper: Scraper,
        *,
        namespaces: Sequence[str],
        clock: Callable[[], float],
        metrics: OperatorMetrics,
    ) -> None:
        self._cluster = cluster
        self._scraper = scraper
        self._namespaces = namespaces
        self._clock = clock
        self._metrics = metrics
        self._pods: dict[str, _Pod] = {}
        self._counters: dict[Key, _Counters] = {}
        self._figures: dict[Key, LiveFigures] = {}
        self._unlisted: set[str | None] = set()

    async def run(self, interval: float) -> None:
        """Until it is cancelled."""
        while True:
            began = self._clock()
            await self.sample()
            await asyncio.sleep(max(0.0, interval - (self._clock() - began)))

    async def sample(self) -> None:
        """Once: lists the pods and asks all that are due."""
        await asyncio.gather(*(self._sample(scope) for scope in scopes(self._namespaces)))

    async def _sample(self, scope: str | None) -> None:
        """Where pods cannot be listed, what is known of them grows old; those of other namespaces do not."""
        try:
            pods = await self._cluster.list(POD, scope, labels=selector(SERVING), is_cached=True)
        except OperatorError as error:
            if scope not in self._unlisted:
                log_event(
                    _logger, logging.WARNING, "pods could not be listed", namespace=scope, error=str(error)
                )
            self._unlisted.add(scope)
            return
        self._unlisted.discard(scope)
        now = self._clock()
        await asyncio.gather(*(self._ask(pod) for pod in self._keep(scope, pods) if pod.not_before <= now))

    def of(self, namespace: str, name: str) -> ResourceLoad | None:
        """None where no pod has told its load of late: then nobody knows it."""
        samples = self._samples((namespace, name)).values()
        return total_load(samples, now=self._clock(), fresh_seconds=FRESH_SECONDS)

    def figures(self, namespace: str, name: str) -> LiveFigures:
        """Since the last call for the resource, as far as that is about counters."""
        key = (namespace, name)
        samples = {uid: sample for uid, sample in self._samples(key).items() if sample is not None}
        before = self._counters.get(key, _Counters())
        first = {uid: pod.first for uid, pod in self._pods.items() if pod.key == key and pod.first}
        figures = live_figures(
            samples,
            self.of(*key),
            drafted={uid: sample.draft_tokens for uid, sample in first.items()} | before.drafted,
            accepted={uid: sample.accepted_tokens for uid, sample in first.items()} | before.accepted,
            last=self._figures.get(key),
        )
        self._counters[key] = _Counters(
            drafted={uid: sample.draft_tokens for uid, sample in samples.items()},
            accepted={uid: sample.accepted_tokens for uid, sample in samples.items()},
        )
        self._figures[key] = figures
        return figures

    def forget(self, scope: str | None, keys: Iterable[Key]) -> None:
        """What is kept of resources of the namespace, or of all of them, that are not among these."""
        kept = set(keys)
        for kind in (self._counters, self._figures):
            for key in [key for key in kind if scope in (None, key[0]) and key not in kept]:
                del kind[key]

    async def refresh(self, namespace: str, pods: Iterable[Object]) -> Mapping[str, int | None]:
        """By name, requests in flight of pods that are ready; None where one does not tell."""
        asked = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in pods if _is_asked(pod)}
        samples = await asyncio.gather(
            *(self._scraper.scrape(address) for address in asked.values()), return_exceptions=True
        )
        return {
            name: sample.in_flight if isinstance(sample, PodSample) else None
            for name, sample in zip(asked, samples, strict=True)
        }

    def _samples(self, key: Key) -> dict[str, PodSample | None]:
        return {uid: pod.sample for uid, pod in self._pods.items() if pod.key == key}

    def _keep(self, scope: str | None, pods: Iterable[Object]) -> list[_Pod]:
        """What is known of pods of the scope that are still there; returns that."""
        kept: dict[str, _Pod] = {}
        for pod in filter(_is_asked, pods):
            metadata: dict[str, Any] = pod["metadata"]
            uid, address = metadata["uid"], pod["status"]["podIP"]
            key = metadata["namespace"], metadata["labels"].get(INSTANCE_LABEL, "")
            kept[uid] = self._pods.get(uid) or _Pod(key, address)
            kept[uid].address = address
        others = {uid: pod for uid, pod in self._pods.items() if scope not in (None, pod.key[0])}
        self._pods = others | kept
        return list(kept.values())

    async def _ask(self, pod: _Pod) -> None:
        try:
            pod.sample = await self._scraper.scrape(pod.address)
            pod.first = pod.first or pod.sample
            pod.failures, pod.not_before = 0, 0.0
            self._metrics.scrapes.labels("ok").inc()
        except OperatorError as error:
            pod.failures += 1
            pod.not_before = self._clock() + min(2.0**pod.failures, _LAST_RETRY_SECONDS)
            self._metrics.scrapes.labels("failed").inc()
            if pod.failures == 1:
                namespace, name = pod.key
                log_event(
                    _logger,
                    logging.INFO,
                    "pod was not scraped",
                    namespace=namespace,
                    resource=name,
                    error=str(error),
                )


def _is_asked(pod: Object) -> bool:
    return is_alive(pod) and is_ready(pod) and bool(pod["status"].get("podIP"))
