"""For tests: a cluster in front of a real one that counts writes and can break down at any of them."""

from __future__ import annotations

from draftline_operator.cluster.forwarding import ForwardingCluster
from draftline_operator.cluster.interface import Cluster
from draftline_operator.models.kinds import Kind
from draftline_operator.models.observed import Object


class Killed(BaseException):
    """What a killed process would look like to its own code, if it could."""


class RecordingCluster(ForwardingCluster):
    """Passes everything on. `writes` has verb, kind and name; `kill_after` ends the process after so many."""

    def __init__(self, cluster: Cluster, *, kill_after: int | None = None) -> None:
        super().__init__(cluster)
        self.kill_after = kill_after
        self.writes: list[tuple[str, str, str]] = []

    def _after(self, verb: str, kind: Kind, namespace: str | None, name: str, written: Object | None) -> None:
        self.writes.append((verb, kind.kind, name))
        if self.kill_after is not None and len(self.writes) >= self.kill_after:
            raise Killed
