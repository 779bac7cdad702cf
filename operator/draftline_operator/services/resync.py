"""The periodic look at every resource: whatever an event failed to tell is found here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from draftline_operator.cluster.interface import Cluster
from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.errors import OperatorError
from draftline_operator.log import log_event
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT
from draftline_operator.services.worker import Key, WorkQueue, add_all

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 5.0, 60.0

_logger = logging.getLogger(__name__)


def scopes(namespaces: Sequence[str]) -> Sequence[str | None]:
    """The namespaces to list one by one; None stands for all of them at once.

    One that cannot be listed, because it is gone with its Role, is no reason to leave out the others.
    """
    return namespaces or (None,)


def key_of(metadata: dict[str, str]) -> Key:
    return metadata["namespace"], metadata["name"]


async def resync(
    cluster: Cluster, queue: WorkQueue, memory: ObjectMemory, namespaces: Sequence[str], *, interval: float
) -> None:
    """Puts all resources into the queue again and again, until it is cancelled: first at once.

    What is remembered is forgotten before, so that each of them is seen as it is.
    """
    async with asyncio.TaskGroup() as group:
        for scope in scopes(namespaces):
            group.create_task(_resync(cluster, queue, memory, scope, interval=interval))


async def _resync(
    cluster: Cluster, queue: WorkQueue, memory: ObjectMemory, scope: str | None, *, interval: float
) -> None:
    spread, wait = 0.0, _FIRST_RETRY_SECONDS
    while True:
        memory.forget(scope)
        try:
            bodies = await cluster.list(SPECULATIVE_DEPLOYMENT, scope)
        except OperatorError as error:
            log_event(
                _logger, logging.WARNING, "resources could not be listed", namespace=scope, error=str(error)
            )
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LAST_RETRY_SECONDS)
            continue
        add_all(queue, [key_of(body["metadata"]) for body in bodies], over=spread)
        await asyncio.sleep(interval)
        spread, wait = interval / 2, _FIRST_RETRY_SECONDS
