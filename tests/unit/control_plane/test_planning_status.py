"""The status is written where it differs and nowhere else; live figures are left to their own writer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftline_operator.constants import REVISION_LABEL
from draftline_operator.models.kinds import DEPLOYMENT
from draftline_operator.models.load import LiveFigures
from draftline_operator.models.preflight import PreflightResult
from draftline_operator.models.status import Condition, ConditionType, SpeculativeDeploymentStatus
from draftline_operator.planning.gate import Gate
from draftline_operator.planning.rollout import read_rollout
from draftline_operator.planning.status import (
    keep_what_was_seen,
    merge_patch,
    status_change,
    status_document,
)
from draftline_operator.services.figures import figures_change
from support.observations import KEY, NAME, NOW, deployment, observed

RESULT = PreflightResult.model_validate(
    {
        "pairDigest": "sha256:new",
        "target": {
            "architecture": "Llama",
            "digest": "sha256:t",
            "revision": "abc",
            "weightsBytes": 1,
            "kvBytesPerToken": 1,
            "maxContextLength": 8,
        },
        "memory": {
            "weightsBytes": 1,
            "activationBytes": 2,
            "kvBytesPerToken": 3,
            "kvPoolBytes": 4,
            "requiredBytes": 5,
        },
    }
)


def verified() -> Gate:
    return Gate(state="verified", pair_key=KEY, reason="Verified", message="", result=RESULT)


def document(*, old: dict[str, Any] | None = None, gate: Gate | None = None) -> dict[str, Any]:
    live = deployment()
    live["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] = KEY
    return status_document(
        observed=observed(status=old or {}, named={(DEPLOYMENT, NAME): live}),
        generation=3,
        conditions=[Condition(ConditionType.READY, "True", "PodsAvailable")],
        gate=gate,
        rollout=read_rollout(live),
        selector="a=b",
        now=NOW,
    )


def test_every_field_is_one_that_the_crd_keeps() -> None:
    written = document(gate=verified())
    stored = SpeculativeDeploymentStatus.model_validate_json(json.dumps(written))
    assert stored.model_dump(by_alias=True, exclude_none=True, mode="json").keys() >= written.keys()


def test_it_tells_what_was_found_out_of_the_pair() -> None:
    written = document(gate=verified())
    assert written["pairDigest"] == "sha256:new"
    assert written["target"] == {"architecture": "Llama", "digest": "sha256:t", "revision": "abc"}
    assert written["memoryPlan"]["requiredBytes"] == 5
    assert "availableBytes" not in written["memoryPlan"]
    assert written["currentRevision"] == KEY
    assert written["observedGeneration"] == 3


def test_what_is_known_of_the_old_pair_stays_while_a_new_one_is_checked() -> None:
    running = Gate(state="running", pair_key="ffffffff", reason="PreflightRunning", message="")
    written = document(old={"pairDigest": "sha256:old", "queueDepth": 4}, gate=running)
    assert written["pairDigest"] == "sha256:old"
    assert "queueDepth" not in written


def test_the_same_status_is_no_change() -> None:
    written = document(gate=verified())
    assert status_change({**written, "queueDepth": 4}, document(old=written, gate=verified())) == {}


@pytest.mark.parametrize(
    ("total", "told"),
    [
        pytest.param(4, 3, id="surge-of-a-rollout"),
        pytest.param(5, 3, id="scale-in-not-done-yet"),
        pytest.param(1, 1, id="pods-not-made-yet"),
    ],
)
def test_it_never_tells_an_autoscaler_of_more_pods_than_were_asked_for(total: int, told: int) -> None:
    live = deployment(replicas=3, total=total)
    written = status_document(
        observed=observed(named={(DEPLOYMENT, NAME): live}),
        generation=3,
        conditions=[],
        gate=None,
        rollout=read_rollout(live),
        selector="a=b",
        now=NOW,
    )
    assert written["replicas"] == told


def test_of_a_look_that_was_refused_it_tells_what_stands_in_the_way_and_keeps_all_else() -> None:
    def told(generation: int, reason: str, *, pods: int) -> dict[str, Any]:
        types = ("Ready", "Available", "Progressing", "Degraded", "ModelsVerified")
        conditions = [{"type": kind, "reason": reason, "observedGeneration": generation} for kind in types]
        return {"observedGeneration": generation, "conditions": conditions, "replicas": pods}

    before = {**told(3, "AsSeen", pods=2), "currentRevision": KEY}
    kept = keep_what_was_seen(told(4, "Forbidden", pods=0), before)
    assert (kept["observedGeneration"], kept["replicas"], kept["currentRevision"]) == (4, 2, KEY)
    assert {condition["type"]: condition["reason"] for condition in kept["conditions"]} == {
        "Ready": "Forbidden",
        "Available": "AsSeen",
        "Progressing": "Forbidden",
        "Degraded": "Forbidden",
        "ModelsVerified": "AsSeen",
    }
    assert keep_what_was_seen(told(1, "Forbidden", pods=0), {}) == told(1, "Forbidden", pods=0)


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        pytest.param({"a": 1}, {"a": 1}, {}, id="same"),
        pytest.param({}, {"a": 1}, {"a": 1}, id="new"),
        pytest.param({"a": 1, "b": 2}, {"a": 1}, {"b": None}, id="gone"),
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": None}}, id="nested"),
        pytest.param({"a": [1]}, {"a": [1, 2]}, {"a": [1, 2]}, id="list-as-a-whole"),
        pytest.param({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}, id="kind-of-value"),
    ],
)
def test_a_change_is_as_small_as_it_can_be(
    old: dict[str, Any], new: dict[str, Any], change: dict[str, Any]
) -> None:
    assert merge_patch(old, new) == change


def test_figures_are_written_when_they_differ_and_removed_when_nobody_knows_them() -> None:
    status = {"queueDepth": 3, "acceptanceRate": 0.5, "conditions": []}
    assert figures_change(status, LiveFigures(queue_depth=3, acceptance_rate=0.5)) == {}
    assert figures_change(status, LiveFigures(queue_depth=4)) == {"queueDepth": 4, "acceptanceRate": None}
