"""What the operator's bench measured in one phase after the other, and what is wrong with it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from support.audit_log import Request

OPERATOR, USER = "bench-operator", "admin"
RESOURCES, JOBS = "speculativedeployments", "jobs"
CHILDREN = (
    JOBS,
    "deployments",
    "configmaps",
    "services",
    "serviceaccounts",
    "poddisruptionbudgets",
    "networkpolicies",
    "horizontalpodautoscalers",
)
MAKES_OR_CHANGES = ("create", "update", "patch")
CREATED = 201


@dataclass(frozen=True)
class Phase:
    """What happened between two looks at the operator."""

    name: str
    seconds: float
    cpu_seconds: float
    machine_seconds: float
    """CPU time of all processes together."""
    resident_mib: float
    reconciles: int
    requests: int
    watches_and_leases: int
    delays: Mapping[str, float | None]
    """From the user's request about a resource to the last write of a child of it; None: there was none."""
    preflights: int
    """Jobs that check a pair."""


def delays_of(log: Sequence[Request]) -> dict[str, float | None]:
    """Of each resource that the user made or changed: a child's name begins with its resource's."""
    requests = {
        request.name: request.began
        for request in log
        if request.user == USER and request.resource == RESOURCES and request.verb in MAKES_OR_CHANGES
    }
    last_write: dict[str, float] = {}
    for write in log:
        name = resource_of(write.name)
        is_child = write.user == OPERATOR and write.resource in CHILDREN and write.verb in MAKES_OR_CHANGES
        if is_child and write.began >= requests.get(name, math.inf):
            last_write[name] = max(last_write.get(name, 0.0), write.ended)
    return {name: last_write[name] - at if name in last_write else None for name, at in requests.items()}


def preflights_in(log: Sequence[Request]) -> int:
    made = [r for r in log if r.user == OPERATOR and r.resource == JOBS and r.code == CREATED]
    return len(made)


def resource_of(child: str) -> str:
    """Resources are named `chat-NUMBER` here."""
    return "-".join(child.split("-")[:2])


def faults_of(phases: Sequence[Phase]) -> list[str]:
    """Why the figures are not those of an operator that works."""
    faults = []
    for phase in phases:
        unanswered = sorted(name for name, delay in phase.delays.items() if delay is None)
        if unanswered:
            faults.append(f"{phase.name}: no child was written of {len(unanswered)}: {', '.join(unanswered)}")
    preflights = sum(phase.preflights for phase in phases)
    if preflights != 1:
        faults.append(f"the pair was checked {preflights} times")
    return faults


def render(phases: Sequence[Phase]) -> str:
    """As a markdown document."""
    head = (
        "| | p50 | p95 | max | wall | CPU | CPU of all | memory | reconciles | API requests per reconcile |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    return "\n".join([*head, *map(_row, phases)])


def _row(phase: Phase) -> str:
    times = sorted(delay for delay in phase.delays.values() if delay is not None)
    shown = ["-"] * 3
    if times:
        p95 = times[max(0, -(-95 * len(times) // 100) - 1)]
        shown = [f"{value:.2f} s" for value in (statistics.median(times), p95, times[-1])]
    per_reconcile = f"{phase.requests / phase.reconciles:.1f}" if phase.reconciles else "-"
    cells = [
        phase.name,
        *shown,
        f"{phase.seconds:.0f} s",
        f"{phase.cpu_seconds:.1f} s",
        f"{phase.machine_seconds:.1f} s",
        f"{phase.resident_mib:.0f} MiB",
        str(phase.reconciles),
        per_reconcile,
    ]
    return f"| {' | '.join(cells)} |"
