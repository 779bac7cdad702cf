"""The conditions of a resource, from what is known of it. Pure.

Ready       as many pods as wanted serve, and nothing stands in the way of the spec. It stays True while a
            change is on its way and capacity is whole: a router must not drop a model that serves.
Available   at least one pod serves.
Progressing a change is on its way: being verified, rolled out or scaled.
Degraded    something is wrong that a person should look at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftline_operator.models.status import Condition, ConditionType
from draftline_operator.planning.gate import Gate
from draftline_operator.planning.pod_faults import PodFault
from draftline_operator.planning.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a spec is not followed."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the conditions depend on."""

    wanted: int
    """Replicas."""
    rollout: Rollout | None
    """None where there is no Deployment of ours."""
    gate: Gate | None
    """None where the spec says no valid pair."""
    autoscaling: Condition
    problem: Problem | None = None
    """Nothing of the spec can be followed."""
    warning: Problem | None = None
    """It is followed, with something missing."""
    fault: PodFault | None = None

    @property
    def available(self) -> int:
        return self.rollout.available if self.rollout is not None else 0

    @property
    def is_rolled_out(self) -> bool:
        rollout = self.rollout
        return rollout is not None and rollout.is_complete and rollout.desired == self.wanted


def decide_conditions(situation: Situation) -> list[Condition]:
    """All of them, always, in the order of `ConditionType`."""
    return [
        _ready(situation),
        _available(situation),
        _progressing(situation),
        _degraded(situation),
        _models_verified(situation),
        _memory_fits(situation),
        situation.autoscaling,
    ]


def _ready(s: Situation) -> Condition:
    if s.problem is not None:
        return _false(ConditionType.READY, s.problem.reason, s.problem.message)
    if s.gate is not None and s.gate.state == "failed":
        return _false(ConditionType.READY, s.gate.reason, s.gate.message)
    if s.rollout is not None and s.rollout.is_stuck and not s.is_rolled_out:
        return _false(ConditionType.READY, *_stuck(s))
    if s.rollout is None:
        return _false(ConditionType.READY, *_waiting_for_pods(s))
    if s.wanted == 0:
        return _true(ConditionType.READY, "ScaledToZero", "no pods are wanted")
    if s.available >= s.wanted:
        return _true(ConditionType.READY, "PodsAvailable", _pods(s))
    if s.fault is not None:
        return _false(ConditionType.READY, s.fault.reason, f"{_pods(s)}: {s.fault.message}")
    return _false(ConditionType.READY, "PodsUnavailable", _pods(s))


def _available(s: Situation) -> Condition:
    if s.available > 0:
        return _true(ConditionType.AVAILABLE, "PodsAvailable", "the model is served")
    if s.wanted == 0:
        return _false(ConditionType.AVAILABLE, "ScaledToZero", "no pods are wanted")
    return _false(ConditionType.AVAILABLE, "NoPodsAvailable", "no pod serves")


def _progressing(s: Situation) -> Condition:
    if s.problem is not None:
        return _false(ConditionType.PROGRESSING, s.problem.reason, "the spec cannot be followed")
    if s.gate is not None and s.gate.state == "failed":
        return _false(ConditionType.PROGRESSING, s.gate.reason, "the models are not rolled out")
    if s.gate is not None and not s.gate.is_open:
        return _true(ConditionType.PROGRESSING, "VerifyingModels", s.gate.message)
    if s.is_rolled_out:
        return _false(ConditionType.PROGRESSING, "RolledOut", "all pods are up to date")
    if s.rollout is not None and s.rollout.is_stuck:
        return _false(ConditionType.PROGRESSING, *_stuck(s))
    if s.fault is not None and s.fault.is_passing:
        return _true(ConditionType.PROGRESSING, s.fault.reason, s.fault.message)
    updated = s.rollout.updated if s.rollout is not None and s.rollout.is_observed else 0
    return _true(ConditionType.PROGRESSING, "RollingOut", f"{updated} of {s.wanted} pods are up to date")


def _degraded(s: Situation) -> Condition:
    for trouble in (s.problem, s.warning):
        if trouble is not None:
            return _true(ConditionType.DEGRADED, trouble.reason, trouble.message)
    if s.gate is not None and s.gate.state == "failed":
        return _true(ConditionType.DEGRADED, s.gate.reason, s.gate.message)
    if s.fault is not None and not s.fault.is_passing:
        return _true(ConditionType.DEGRADED, s.fault.reason, s.fault.message)
    if s.rollout is not None and s.rollout.is_stuck and not s.is_rolled_out:
        return _true(ConditionType.DEGRADED, *_stuck(s))
    return _false(ConditionType.DEGRADED, "AsExpected", "")


def _models_verified(s: Situation) -> Condition:
    if s.gate is None:
        reason = s.problem.reason if s.problem is not None else "PreflightPending"
        return Condition(ConditionType.MODELS_VERIFIED, "Unknown", reason, "the models were not checked")
    make: Callable[[ConditionType, str, str], Condition] = {"verified": _true, "failed": _false}.get(
        s.gate.state, _unknown
    )
    return make(ConditionType.MODELS_VERIFIED, s.gate.reason, s.gate.message)


def _memory_fits(s: Situation) -> Condition:
    plan = s.gate.result.memory if s.gate is not None and s.gate.result is not None else None
    if plan is None:
        reason = s.gate.reason if s.gate is not None and s.gate.state == "failed" else "PreflightPending"
        return _unknown(ConditionType.MEMORY_FITS, reason, "no memory plan has been made")
    if plan.available_bytes is None or plan.fits is None:
        message = f"{_gib(plan.required_bytes)} are needed; what there is is not known"
        return _unknown(ConditionType.MEMORY_FITS, "MemoryUnknown", message)
    spare = plan.available_bytes - plan.required_bytes
    if plan.fits:
        return _true(
            ConditionType.MEMORY_FITS,
            "Fits",
            f"{_gib(plan.required_bytes)} of {_gib(plan.available_bytes)} are needed, {_gib(spare)} are left",
        )
    there = _gib(plan.available_bytes)
    message = f"{_gib(plan.required_bytes)} are needed, {_gib(-spare)} more than the {there} that there are"
    return _false(ConditionType.MEMORY_FITS, "MemoryDoesNotFit", message)


def _waiting_for_pods(s: Situation) -> tuple[str, str]:
    if s.warning is not None:
        return s.warning.reason, s.warning.message
    if s.gate is not None and not s.gate.is_open:
        return s.gate.reason, s.gate.message
    return "PodsUnavailable", "no pods were made yet"


def _stuck(s: Situation) -> tuple[str, str]:
    if s.fault is not None:
        return s.fault.reason, s.fault.message
    return "ProgressDeadlineExceeded", "pods of the newest revision do not become ready"


def _pods(s: Situation) -> str:
    return f"{s.available} of {s.wanted} pods are available"


def _gib(size: int) -> str:
    """With three digits that matter."""
    gib = size / 2**30
    return f"{gib:.1f} GiB" if gib >= 10 else f"{gib:.2f} GiB" if gib >= 0.1 else f"{size / 2**20:.1f} MiB"


def _true(kind: ConditionType, reason: str, message: str) -> Condition:
    return Condition(kind, "True", reason, message)


def _false(kind: ConditionType, reason: str, message: str) -> Condition:
    return Condition(kind, "False", reason, message)


def _unknown(kind: ConditionType, reason: str, message: str) -> Condition:
    return Condition(kind, "Unknown", reason, message)
