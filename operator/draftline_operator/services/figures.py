"""Writes the live figures of statuses, now and then and only when they have changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from draftline_operator.cluster.interface import Cluster
from draftline_operator.errors import OperatorError
from draftline_operator.log import log_event
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT
from draftline_operator.models.load import LiveFigures
from draftline_operator.models.observed import Object, is_terminating
from draftline_operator.planning.status import merge_patch
from draftline_operator.services.load import LoadCache
from draftline_operator.services.resync import key_of, scopes

_logger = logging.getLogger(__name__)


async def write_figures(
    cluster: Cluster, loads: LoadCache, namespaces: Sequence[str], *, interval: float
) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(interval)
        try:
            lists = [
                await cluster.list(SPECULATIVE_DEPLOYMENT, scope, is_cached=True)
                for scope in scopes(namespaces)
            ]
            await _write_once(cluster, loads, [body for bodies in lists for body in bodies])
        except OperatorError as error:
            log_event(_logger, logging.WARNING, "live figures were not written", error=str(error))


async def _write_once(cluster: Cluster, loads: LoadCache, bodies: list[Object]) -> None:
    loads.forget(key_of(body["metadata"]) for body in bodies)
    for body in bodies:
        namespace, name = key_of(body["metadata"])
        status = body.get("status") or {}
        if is_terminating(body) or "observedGeneration" not in status:
            continue
        change = figures_change(status, loads.figures(namespace, name))
        if change:
            await cluster.patch(
                SPECULATIVE_DEPLOYMENT, namespace, name, {"status": change}, subresource="status"
            )


def figures_change(status: dict[str, Any], figures: LiveFigures) -> dict[str, Any]:
    """The merge patch of a status; a figure that nobody knows is taken away."""
    known = {
        "acceptanceRate": figures.acceptance_rate,
        "queueDepth": figures.queue_depth,
        "speculationState": figures.speculation_state,
    }
    before = {key: status[key] for key in known if key in status}
    return merge_patch(before, {key: value for key, value in known.items() if value is not None})
