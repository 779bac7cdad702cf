"""What serving pods say about themselves, and what that makes of a whole resource."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSample:
    """One scrape of a pod's admin port. Counters only ever grow while the pod lives."""

    sampled_at: float
    """Unix seconds."""
    waiting: int = 0
    running: int = 0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    is_speculating: bool | None = None
    """None where the pod does not say."""
    is_draining: bool = False
    pair_digest: str | None = None

    @property
    def in_flight(self) -> int:
        """Requests that would have to be drained."""
        return self.waiting + self.running


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLoad:
    """Requests of all pods that take new ones. Those that did not answer count like the others."""

    waiting: int
    running: int
    sampled_at: float
    """Unix seconds, of the oldest sample in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFigures:
    """The figures of the status that change all the time."""

    queue_depth: int | None = None
    acceptance_rate: float | None = None
    """Of draft tokens, since the figures before these."""
    speculation_state: str | None = None
