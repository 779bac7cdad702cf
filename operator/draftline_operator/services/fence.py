"""Lets writes pass only while this process leads, and counts them."""

from __future__ import annotations

from collections.abc import Callable

from draftline_operator.cluster.forwarding import ForwardingCluster
from draftline_operator.cluster.interface import Cluster
from draftline_operator.errors import NotLeadingError
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.models.kinds import Kind


class FencedCluster(ForwardingCluster):
    """A `Cluster` that refuses to write once the Lease may be somebody else's.

    It looks at the clock just before each write: a process that was asleep does not finish what it began.
    What it had passed on before it fell asleep the client refuses, see `ClusterClient.fenced`.
    """

    def __init__(self, cluster: Cluster, is_leader: Callable[[], bool], metrics: OperatorMetrics) -> None:
        super().__init__(cluster)
        self._is_leader = is_leader
        self._metrics = metrics

    def _before(self, verb: str, kind: Kind) -> None:
        if not self._is_leader():
            raise NotLeadingError
        self._metrics.writes.labels(kind.kind, verb).inc()
