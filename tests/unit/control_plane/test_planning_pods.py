"""What keeps pods from running is told by one reason that does not flicker; what they do adds up."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.models.load import LiveFigures, PodSample
from draftline_operator.models.observed import Object
from draftline_operator.planning.events import fingerprint
from draftline_operator.planning.load import live_figures, total_load
from draftline_operator.planning.pod_faults import find_fault
from support.observations import serving_pod


def pod(*, is_leaving: bool = False, asks: dict[str, str] | None = None, **status: Any) -> Object:
    spec = {"containers": [{"name": "server", "resources": {"limits": asks or {}}}]}
    return serving_pod("a", is_ready=False, is_leaving=is_leaving, spec=spec, status=status)


def waiting(reason: str, *, ended: int | None = None) -> Object:
    last = {"terminated": {"exitCode": ended}} if ended is not None else {}
    status = {"name": "server", "ready": False, "state": {"waiting": {"reason": reason}}, "lastState": last}
    return pod(containerStatuses=[status])


def unschedulable(message: str, asks: dict[str, str] | None = None) -> Object:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return pod(asks=asks, phase="Pending", conditions=[condition])


def test_pods_that_start_are_no_fault() -> None:
    assert find_fault([waiting("ContainerCreating"), serving_pod("b")]) is None


def test_a_crash_is_the_same_fault_between_two_crashes() -> None:
    running = {"name": "server", "ready": False, "state": {"running": {}}}
    again = pod(containerStatuses=[{**running, "lastState": {"terminated": {"exitCode": 1}}}])
    assert find_fault([again]) == find_fault([waiting("CrashLoopBackOff", ended=1)])


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "line\nerror: models.target_model.path: /models: no such directory\n",
            "exit code 2, error: models.",
        ),
        ('{"level": "info", "ts": "2026-11-30T12:00:00Z"}', "exit code 2"),
        (None, "exit code 2"),
    ],
)
def test_the_last_words_of_a_start_that_failed_are_told_and_no_log_that_differs_each_time(
    message: str | None, told: str
) -> None:
    end = {"exitCode": 2, "reason": "Error", **({"message": message} if message else {})}
    status = {"name": "server", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    fault = find_fault([pod(containerStatuses=[{**status, "lastState": {"terminated": end}}])])
    assert fault is not None
    assert fault.message.startswith(f"container server ended: {told}")
    assert "level" not in fault.message
    assert "\n" not in fault.message


def test_a_pod_that_became_ready_after_a_crash_is_no_fault() -> None:
    running = {"name": "server", "ready": True, "state": {"running": {}}}
    assert (
        find_fault([pod(containerStatuses=[{**running, "lastState": {"terminated": {"exitCode": 1}}}])])
        is None
    )


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_an_image_that_cannot_be_pulled_has_one_name(reason: str) -> None:
    fault = find_fault([waiting(reason)])
    assert fault is not None
    assert fault.reason == "ImagePullBackOff"


def test_leaving_pods_are_no_fault() -> None:
    crashed = waiting("CrashLoopBackOff", ended=1)
    crashed["metadata"]["deletionTimestamp"] = "now"
    assert find_fault([crashed]) is None


def test_evicted_pods_that_still_lie_around_are_no_fault() -> None:
    crashed = waiting("CrashLoopBackOff", ended=1)
    crashed["status"]["phase"] = "Failed"
    assert find_fault([crashed]) is None


@pytest.mark.parametrize(
    ("message", "asks", "reason"),
    [
        pytest.param(
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            {"nvidia.com/gpu": "1"},
            "InsufficientGPU",
            id="gpu",
        ),
        pytest.param("0/1 nodes are available: 1 Insufficient cpu.", {"cpu": "1"}, "Unschedulable", id="cpu"),
        pytest.param("0/1 nodes: 1 had untolerated taint", None, "Unschedulable", id="taint"),
    ],
)
def test_a_pod_that_fits_no_node_says_what_is_short(
    message: str, asks: dict[str, str] | None, reason: str
) -> None:
    fault = find_fault([unschedulable(message, asks)])
    assert fault is not None
    assert (fault.reason, fault.is_passing) == (reason, True)


def test_a_crash_is_told_before_a_pod_that_waits_for_room() -> None:
    fault = find_fault(
        [unschedulable("Insufficient cpu", {"cpu": "1"}), waiting("CrashLoopBackOff", ended=1)]
    )
    assert fault is not None
    assert fault.reason == "CrashLoopBackOff"


def sample(*, at: float = 100.0, **parts: Any) -> PodSample:
    return PodSample(sampled_at=at, **parts)


def total(*samples: PodSample | None) -> tuple[int, int] | None:
    load = total_load(samples, now=100.0, fresh_seconds=15.0)
    return (load.waiting, load.running) if load is not None else None


def test_a_load_is_the_sum_over_pods() -> None:
    assert total(sample(waiting=2, running=3), sample(running=4)) == (2, 7)


def test_a_pod_that_does_not_answer_counts_like_the_others() -> None:
    assert total(sample(waiting=2, running=4), None) == (4, 8)
    assert total(sample(waiting=2, running=4), sample(at=50.0, running=99)) == (4, 8)


def test_a_pod_that_drains_is_not_counted() -> None:
    assert total(sample(running=1), sample(running=9, is_draining=True)) == (0, 1)


def test_a_load_that_nobody_tells_is_not_zero() -> None:
    assert total() is None
    assert total(None, sample(at=10.0)) is None


def figures(samples: dict[str, PodSample], *, last: LiveFigures | None = None, **before: Any) -> LiveFigures:
    load = total_load(samples.values(), now=100.0, fresh_seconds=15.0)
    given = {"drafted": {}, "accepted": {}, **before}
    return live_figures(samples, load, last=last, **given)


def test_acceptance_is_that_of_the_tokens_since_the_last_figures() -> None:
    now = {"a": sample(draft_tokens=1200, accepted_tokens=700)}
    assert figures(now, drafted={"a": 1000}, accepted={"a": 600}).acceptance_rate == 0.5


def test_a_pod_that_is_seen_for_the_first_time_says_nothing_of_its_long_life() -> None:
    now = {"a": sample(draft_tokens=1200, accepted_tokens=600), "b": sample(draft_tokens=9000)}
    assert figures(now, drafted={"a": 1000}, accepted={"a": 500}).acceptance_rate == 0.5
    assert figures({"b": sample(draft_tokens=9000)}).acceptance_rate is None


def test_without_pods_nothing_is_accepted() -> None:
    assert figures({}, last=LiveFigures(acceptance_rate=0.7)).acceptance_rate is None


def test_acceptance_of_a_handful_of_tokens_is_not_told() -> None:
    last = LiveFigures(acceptance_rate=0.7)
    assert figures({"a": sample(draft_tokens=9, accepted_tokens=0)}, last=last).acceptance_rate == 0.7


def test_counters_of_a_container_that_started_anew_count_from_zero() -> None:
    now = {"a": sample(draft_tokens=200, accepted_tokens=50)}
    assert figures(now, drafted={"a": 5000}, accepted={"a": 4000}).acceptance_rate == 0.25


@pytest.mark.parametrize(("waiting_now", "told"), [(0, 0), (7, 7), (99, 99), (123, 120), (5678, 5700)])
def test_queue_depth_has_two_digits(waiting_now: int, told: int) -> None:
    assert figures({"a": sample(waiting=waiting_now)}).queue_depth == told


@pytest.mark.parametrize(
    ("states", "told"),
    [((True, True), "Active"), ((False,), "Off"), ((True, False), "Mixed"), ((None,), None)],
)
def test_speculation_is_told_over_all_pods(states: tuple[bool | None, ...], told: str | None) -> None:
    samples = {str(number): sample(is_speculating=state) for number, state in enumerate(states)}
    assert figures(samples).speculation_state == told


def test_a_resources_own_status_is_no_news_and_its_labels_are() -> None:
    body: Any = {"kind": "SpeculativeDeployment", "metadata": {"uid": "u", "generation": 1}}
    assert fingerprint(body) == fingerprint({**body, "status": {"queueDepth": 3}})
    assert fingerprint(body) != fingerprint({**body, "metadata": {**body["metadata"], "labels": {"a": "b"}}})
    assert fingerprint(body) != fingerprint({**body, "metadata": {"uid": "u", "generation": 2}})


def test_what_an_autoscaler_measures_is_no_news_and_what_it_concludes_is() -> None:
    def autoscaler(value: str, status: str) -> dict[str, Any]:
        conditions = [{"type": "ScalingActive", "status": status, "reason": "R", "message": value}]
        metrics = {"currentMetrics": value, "conditions": conditions}
        return {"kind": "HorizontalPodAutoscaler", "metadata": {"uid": "u"}, "spec": {}, "status": metrics}

    assert fingerprint(autoscaler("1", "True")) == fingerprint(autoscaler("2", "True"))
    assert fingerprint(autoscaler("1", "True")) != fingerprint(autoscaler("1", "False"))


def test_the_record_of_a_pair_is_news_once_and_not_with_each_owner() -> None:
    record: Any = {"kind": "ConfigMap", "metadata": {"uid": "u"}, "data": {"result.json": "{}"}}
    owned = {**record, "metadata": {"uid": "u", "ownerReferences": [{"uid": "o"}]}}
    assert fingerprint(record) == fingerprint(owned)
    assert fingerprint(record) != fingerprint({**record, "data": {"result.json": "spoiled"}})


def test_a_deployments_status_is_news() -> None:
    body: Any = {"kind": "Deployment", "metadata": {"uid": "u", "resourceVersion": "1"}, "status": {"a": 1}}
    assert fingerprint(body) != fingerprint({**body, "status": {"a": 2}})
    assert fingerprint(body) == fingerprint({**body, "metadata": {"uid": "u", "resourceVersion": "2"}})
