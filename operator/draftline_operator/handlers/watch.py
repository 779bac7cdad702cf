"""Runs kopf inside our own event loop, as a source of events and nothing more."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import kopf

from draftline_operator.cluster.client import Credentials
from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.constants import FIELD_MANAGER, OUR_LABELS
from draftline_operator.handlers.registry import build_registry, watched_children
from draftline_operator.models.kinds import Kind
from draftline_operator.services.worker import WorkQueue

_FIRST_WAITS, _LAST_WAIT = (1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0), 21.0


async def watch(
    queue: WorkQueue,
    memory: ObjectMemory,
    *,
    namespaces: Sequence[str],
    optional_kinds: Collection[Kind],
    credentials: Callable[[], Awaitable[Credentials]],
    stop: asyncio.Event,
) -> None:
    """Until `stop` is set, or the process is told to end: kopf listens to signals, too."""
    await kopf.operator(
        registry=build_registry(queue, memory, optional_kinds, credentials),
        settings=kopf_settings(optional_kinds),
        # For peers, of which there are none; left out, kopf asks for the user's name: a pod's user has none.
        identity=cast(Any, FIELD_MANAGER),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
    )


def kopf_settings(optional_kinds: Collection[Kind]) -> kopf.OperatorSettings:
    """It watches what is told, and writes nothing."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # kinds and namespaces are known; watching them needs more rights
    settings.posting.enabled = False
    settings.posting.reporting_component = FIELD_MANAGER
    settings.watching.server_timeout = 290  # a whole number, as the API wants it
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Backoffs()
    settings.process.ultimate_exiting_timeout = 20
    settings.persistence.diffbase_storage = _NoComparison()
    labels = ",".join(f"{key}={value}" for key, value in OUR_LABELS.items())
    for address in watched_children(optional_kinds):
        settings.watching.label_selectors[address] = labels
    return settings


class _NoComparison(kopf.DiffBaseStorage):
    """Of no object there is anything that was handled last, nor is anything to be compared with it.

    For its change handlers, of which we have none, kopf would copy each object at each event: milliseconds,
    for a pod.
    """

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class _Backoffs:
    """Waits between the tries of a request, without end.

    After its last wait kopf gives up, and with it the operator of all namespaces, for one watch that is
    refused: as in a namespace that is gone, with the Role in it. Tried for ever, it goes on when both are
    there again.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain(_FIRST_WAITS, itertools.repeat(_LAST_WAIT))
