"""The periodic look at every resource: whatever an event failed to tell is found here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from draftline_operator.cluster.interface import Cluster
from draftline_operator.errors import OperatorError
from draftline_operator.log import log_event
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT
from draftline_operator.services.worker import Key, WorkQueue, add_all

_RETRY_SECONDS = 5.0

_logger = logging.getLogger(__name__)


def scopes(namespaces: Sequence[str]) -> Sequence[str | None]:
    """The namespaces to list one by one; None stands for all of them at once."""
    return namespaces or (None,)


async def list_keys(cluster: Cluster, namespaces: Sequence[str]) -> list[Key]:
    """All resources that there are."""
    found = [await cluster.list(SPECULATIVE_DEPLOYMENT, scope) for scope in scopes(namespaces)]
    return [key_of(body["metadata"]) for bodies in found for body in bodies]


def key_of(metadata: dict[str, str]) -> Key:
    return metadata["namespace"], metadata["name"]


async def resync(cluster: Cluster, queue: WorkQueue, namespaces: Sequence[str], *, interval: float) -> None:
    """Puts all resources into the queue again and again, until it is cancelled: first at once."""
    spread = 0.0
    while True:
        try:
            keys: Iterable[Key] = await list_keys(cluster, namespaces)
        except OperatorError as error:
            log_event(_logger, logging.WARNING, "resources could not be listed", error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        add_all(queue, keys, over=spread)
        await asyncio.sleep(interval)
        spread = interval / 2
