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
        for scope in scopes(namespaces):
            try:
                bodies = await cluster.list(SPECULATIVE_DEPLOYMENT, scope, is_cached=True)
            except OperatorError as error:
                _log(error, scope)
                continue
            loads.forget(scope, (key_of(body["metadata"]) for body in bodies))
            for body in bodies:
                await _write(cluster, loads, body)


async def _write(cluster: Cluster, loads: LoadCache, body: Object) -> None:
    """A status that cannot be written is left for the next time: it is one of many."""
    namespace, name = key_of(body["metadata"])
    status = body.get("status") or {}
    if is_terminating(body) or "observedGeneration" not in status:
        return
    change = figures_change(status, loads.figures(namespace, name))
    if not change:
        return
    try:
        await cluster.patch(SPECULATIVE_DEPLOYMENT, namespace, name, {"status": change}, subresource="status")
    except OperatorError as error:
        _log(error, namespace, name)


def _log(error: OperatorError, namespace: str | None, name: str | None = None) -> None:
    log_event(
        _logger,
        logging.WARNING,
        "live figures were not written",
        namespace=namespace,
        resource=name,
        error=str(error),
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
