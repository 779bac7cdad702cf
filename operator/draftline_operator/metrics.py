"""The operator's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "draftline_operator"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class OperatorMetrics:
    """One for the process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.reconciles = Counter(
            f"{_PREFIX}_reconciles", "Reconciles by how they ended.", ["outcome"], registry=registry
        )
        self.reconcile_seconds = Histogram(
            f"{_PREFIX}_reconcile_seconds", "Time of a reconcile.", buckets=_SECONDS, registry=registry
        )
        self.writes = Counter(
            f"{_PREFIX}_writes", "Writes to the API server.", ["kind", "verb"], registry=registry
        )
        self.queue_length = Gauge(
            f"{_PREFIX}_queue_length", "Resources that wait for a reconcile.", registry=registry
        )
        self.is_leader = Gauge(f"{_PREFIX}_leader", "1 while this process acts.", registry=registry)
        self.scrapes = Counter(
            f"{_PREFIX}_scrapes", "Scrapes of serving pods by how they ended.", ["outcome"], registry=registry
        )

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
