"""How far a Deployment has got. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from draftline_operator.models.observed import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The Deployment's own figures."""

    desired: int
    replicas: int = 0
    """Pods that are not leaving, of all revisions."""
    updated: int = 0
    ready: int = 0
    available: int = 0
    is_observed: bool = False
    """Whether the figures are about the Deployment as it is now."""
    is_stuck: bool = False
    """Whether it has exceeded its progress deadline."""

    @property
    def lasting(self) -> int:
        """Pods without those that a rollout adds for a moment.

        An autoscaler that finds the load within its tolerance asks for as many pods as it is told that there
        are: told of these, too, it would ask for one more with every rollout.
        """
        return min(self.replicas, self.desired)

    @property
    def is_complete(self) -> bool:
        """All pods are of the newest revision and available, and no other is left but leaving ones."""
        return (
            self.is_observed
            and self.updated == self.replicas == self.desired
            and self.available >= self.desired
        )


def read_rollout(deployment: Object) -> Rollout:
    status = deployment.get("status", {})
    conditions = status.get("conditions") or ()
    return Rollout(
        desired=deployment["spec"].get("replicas", 1),
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        available=status.get("availableReplicas", 0),
        is_observed=status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 1),
        is_stuck=any(
            c.get("type") == "Progressing" and c.get("reason") == "ProgressDeadlineExceeded"
            for c in conditions
        ),
    )
