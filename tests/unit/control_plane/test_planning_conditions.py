"""Conditions say what is, also half-way: Ready is never stale, and never drops while enough pods serve."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.models.preflight import MemoryPlan, PreflightResult
from draftline_operator.models.status import Condition, ConditionType, merge_conditions
from draftline_operator.planning.conditions import Problem, Situation, decide_conditions
from draftline_operator.planning.gate import Gate, GateState
from draftline_operator.planning.pod_faults import PodFault
from draftline_operator.planning.rollout import Rollout, read_rollout
from support.observations import KEY, deployment

AUTOSCALING = Condition(ConditionType.AUTOSCALING_ACTIVE, "False", "NotConfigured")
GIB = 2**30


def gate(state: GateState = "verified", reason: str = "Verified", memory: MemoryPlan | None = None) -> Gate:
    result = PreflightResult(memory=memory) if memory is not None else None
    return Gate(state=state, pair_key=KEY, reason=reason, message="why", result=result)


def rollout(**parts: Any) -> Rollout:
    """Two pods that serve, where nothing else is given."""
    given = {
        "desired": 2,
        "replicas": 2,
        "updated": 2,
        "ready": 2,
        "available": 2,
        "is_observed": True,
        **parts,
    }
    return Rollout(**given)


def conditions(**parts: Any) -> dict[str, tuple[str, str]]:
    """Status and reason by type, of two pods that serve where nothing else is given."""
    given: dict[str, Any] = {
        "wanted": 2,
        "rollout": rollout(),
        "gate": gate(),
        "autoscaling": AUTOSCALING,
        **parts,
    }
    return {c.type: (c.status, c.reason) for c in decide_conditions(Situation(**given))}


def test_all_conditions_are_always_there_in_order() -> None:
    assert list(conditions()) == list(ConditionType)
    assert list(conditions(rollout=None, gate=None, problem=Problem("InvalidSpec", "x"))) == list(
        ConditionType
    )


def test_a_resource_that_serves_is_ready_and_at_rest() -> None:
    found = conditions()
    assert found["Ready"] == ("True", "PodsAvailable")
    assert found["Available"] == ("True", "PodsAvailable")
    assert found["Progressing"] == ("False", "RolledOut")
    assert found["Degraded"] == ("False", "AsExpected")
    assert found["ModelsVerified"] == ("True", "Verified")


def test_a_new_resource_waits_for_its_models_to_be_checked() -> None:
    found = conditions(rollout=None, gate=gate("running", "PreflightRunning"))
    assert found["Ready"] == ("False", "PreflightRunning")
    assert found["Available"][0] == "False"
    assert found["Progressing"] == ("True", "VerifyingModels")
    assert found["ModelsVerified"] == ("Unknown", "PreflightRunning")
    assert found["Degraded"][0] == "False"


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"rollout": rollout(replicas=3, updated=1)}, id="rolling-update-with-surge"),
        pytest.param({"rollout": rollout(is_observed=False)}, id="deployment-not-seen-yet"),
        pytest.param({"gate": gate("running", "PreflightRunning")}, id="new-pair-being-checked"),
        pytest.param({"gate": gate("missing", "PreflightPending")}, id="new-pair-about-to-be-checked"),
    ],
)
def test_only_progressing_changes_while_a_change_is_on_its_way(parts: dict[str, Any]) -> None:
    before, found = conditions(), conditions(**parts)
    changed = {kind for kind in found if found[kind][0] != before[kind][0]}
    assert "Progressing" in changed
    assert changed <= {"Progressing", "ModelsVerified", "MemoryFits"}


def test_fewer_available_pods_than_wanted_are_not_ready() -> None:
    found = conditions(rollout=rollout(available=1))
    assert found["Ready"] == ("False", "PodsUnavailable")
    assert found["Available"][0] == "True"


def test_pods_that_crash_after_they_were_ready_make_it_not_ready_with_their_reason() -> None:
    found = conditions(rollout=rollout(available=0), fault=PodFault("CrashLoopBackOff", "x"))
    assert found["Ready"] == ("False", "CrashLoopBackOff")
    assert found["Available"] == ("False", "NoPodsAvailable")
    assert found["Degraded"] == ("True", "CrashLoopBackOff")


def test_a_scale_out_is_not_ready_until_the_new_pods_are() -> None:
    found = conditions(wanted=3, rollout=rollout(desired=3, replicas=3, updated=3))
    assert found["Ready"] == ("False", "PodsUnavailable")
    assert found["Progressing"] == ("True", "RollingOut")


def test_a_refused_pair_leaves_the_old_one_available_and_says_so() -> None:
    found = conditions(gate=gate("failed", "PairMismatch"))
    assert found["Ready"] == ("False", "PairMismatch")
    assert found["Available"] == ("True", "PodsAvailable")
    assert found["ModelsVerified"] == ("False", "PairMismatch")
    assert found["Degraded"] == ("True", "PairMismatch")
    assert found["Progressing"] == ("False", "PairMismatch")


def test_scaled_to_zero_is_no_failure() -> None:
    found = conditions(wanted=0, rollout=rollout(desired=0, replicas=0, updated=0, ready=0, available=0))
    assert found["Ready"] == ("True", "ScaledToZero")
    assert found["Available"] == ("False", "ScaledToZero")
    assert found["Degraded"][0] == "False"
    assert found["Progressing"][0] == "False"


def test_an_invalid_spec_is_told_and_the_old_workload_stays_available() -> None:
    found = conditions(gate=None, problem=Problem("InvalidSpec", "spec.target: missing"))
    assert found["Ready"] == ("False", "InvalidSpec")
    assert found["Available"] == ("True", "PodsAvailable")
    assert found["Degraded"] == ("True", "InvalidSpec")


def test_a_missing_secret_degrades_what_goes_on_serving() -> None:
    found = conditions(warning=Problem("SecretNotFound", "Secret hub does not exist"))
    assert found["Degraded"] == ("True", "SecretNotFound")
    assert found["Ready"][0] == "True"


def test_a_missing_secret_is_why_a_new_resource_is_not_ready() -> None:
    warning = Problem("SecretNotFound", "Secret hub does not exist")
    found = conditions(rollout=None, gate=gate("missing", "PreflightPending"), warning=warning)
    assert found["Ready"] == ("False", "SecretNotFound")


def test_pods_that_wait_for_a_gpu_are_progress_until_the_deadline() -> None:
    fault = PodFault("InsufficientGPU", "no node has nvidia.com/gpu to spare", is_passing=True)
    waiting = conditions(rollout=rollout(available=1, updated=1), fault=fault)
    assert waiting["Progressing"] == ("True", "InsufficientGPU")
    assert waiting["Ready"] == ("False", "InsufficientGPU")
    assert waiting["Degraded"][0] == "False"
    stuck = conditions(rollout=rollout(available=1, updated=1, is_stuck=True), fault=fault)
    assert stuck["Progressing"] == ("False", "InsufficientGPU")
    assert stuck["Degraded"] == ("True", "InsufficientGPU")


def test_a_stuck_rollout_is_not_ready_although_old_pods_satisfy_the_count() -> None:
    found = conditions(rollout=rollout(replicas=3, updated=1, is_stuck=True))
    assert found["Ready"] == ("False", "ProgressDeadlineExceeded")


def memory(required: int, available: int | None, *, fits: bool | None) -> MemoryPlan:
    return MemoryPlan(
        weights_bytes=1,
        activation_bytes=1,
        kv_bytes_per_token=1,
        kv_pool_bytes=1,
        required_bytes=required,
        available_bytes=available,
        fits=fits,
    )


@pytest.mark.parametrize(
    ("plan", "status", "text"),
    [
        pytest.param(memory(10 * GIB, 24 * GIB, fits=True), "True", "14.0 GiB are left", id="fits"),
        pytest.param(memory(30 * GIB, 24 * GIB, fits=False), "False", "6.00 GiB more", id="does-not"),
        pytest.param(memory(30 * GIB, None, fits=None), "Unknown", "not known", id="unknown"),
    ],
)
def test_memory_is_told_with_by_how_much(plan: MemoryPlan, status: str, text: str) -> None:
    situation = Situation(wanted=2, rollout=rollout(), gate=gate(memory=plan), autoscaling=AUTOSCALING)
    (found,) = [c for c in decide_conditions(situation) if c.type == ConditionType.MEMORY_FITS]
    assert found.status == status
    assert text in found.message


def test_reasons_are_what_kubernetes_accepts() -> None:
    for parts in (
        {},
        {"rollout": None},
        {"gate": None, "problem": Problem("InvalidSpec", "")},
        {"wanted": 0},
    ):
        assert all(reason.isalnum() for _, reason in conditions(**parts).values())


def test_a_transition_time_changes_only_with_the_status() -> None:
    first = merge_conditions([], [Condition(ConditionType.READY, "True", "A")], generation=1, now="t1")
    second = merge_conditions(first, [Condition(ConditionType.READY, "True", "B")], generation=2, now="t2")
    third = merge_conditions(second, [Condition(ConditionType.READY, "False", "C")], generation=2, now="t3")
    assert [c[0]["lastTransitionTime"] for c in (first, second, third)] == ["t1", "t1", "t3"]
    assert second[0]["observedGeneration"] == 2


@pytest.mark.parametrize(
    ("live", "is_complete"),
    [
        pytest.param(deployment(), True, id="settled"),
        pytest.param(deployment(generation=2), False, id="newer-than-its-status"),
        pytest.param(deployment(updated=1), False, id="old-pods-left"),
        pytest.param(deployment(total=3), False, id="surplus-left"),
        pytest.param(deployment(available=1), False, id="not-available"),
        pytest.param(deployment(replicas=0, updated=0, available=0), True, id="none-wanted"),
    ],
)
def test_a_rollout_is_complete_when_nothing_old_is_left(live: dict[str, Any], *, is_complete: bool) -> None:
    assert read_rollout(live).is_complete is is_complete
