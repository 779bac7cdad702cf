"""No pod of a pair is made before the pair was found fit; a verdict is asked for once."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from draftline_operator.models.observed import Object
from draftline_operator.models.preflight import PreflightResult, parse_result
from draftline_operator.planning.gate import (
    PATIENCE_SECONDS,
    RETRY_SECONDS,
    Gate,
    checks_of_others,
    decide_gate,
)
from support.observations import KEY, NOW, observed, preflight_job, preflight_pod, result_message

FAULT = {"reason": "PairMismatch", "message": "tokenizers\ndiffer"}


def decide(*pods: Object, job: Object | None = None, record: str | None = None, now: str = NOW) -> Gate:
    kept: PreflightResult | None = parse_result(record) if record is not None else None
    seen = observed(jobs=(job,) if job is not None else (), pods=pods)
    return decide_gate(KEY, record=kept, observed=seen, now=datetime.datetime.fromisoformat(now))


def test_a_pair_that_nobody_has_checked_needs_a_job() -> None:
    gate = decide()
    assert (gate.state, gate.reason, gate.is_open) == ("missing", "PreflightPending", False)


def test_a_kept_verdict_opens_the_gate_without_any_job() -> None:
    gate = decide(record=result_message())
    assert gate.is_open
    assert gate.is_recorded
    assert gate.job is None


def test_a_kept_refusal_does_not_open_the_gate() -> None:
    assert decide(record=result_message(error=FAULT)).state == "missing"


def test_the_gate_waits_for_a_job_that_runs() -> None:
    assert decide(job=preflight_job()).state == "running"


def test_a_verdict_counts_as_soon_as_the_pod_has_ended() -> None:
    job = preflight_job()
    gate = decide(preflight_pod(job, result_message()), job=job)
    assert gate.is_open
    assert not gate.is_recorded


@pytest.mark.parametrize("message", ['{"message": "fetch began"}', "{}", "killed", ""])
def test_what_is_no_verdict_opens_no_gate(message: str) -> None:
    job = preflight_job(state="Failed")
    assert decide(preflight_pod(job, message, exit_code=137), job=job).state == "failed"
    with pytest.raises(ValueError, match="not the result of a preflight"):
        parse_result(message)


def test_a_refused_pair_says_why_in_one_line() -> None:
    job = preflight_job(state="Failed")
    gate = decide(preflight_pod(job, result_message(error=FAULT), exit_code=2), job=job)
    assert (gate.state, gate.reason, gate.message) == ("failed", "PairMismatch", "tokenizers differ")
    assert gate.retry_after is None, "the same files would be refused again"


def test_a_failed_try_of_a_job_that_goes_on_is_no_verdict() -> None:
    job = preflight_job()
    fault = {"reason": "FetchFailed", "message": "timed out"}
    gate = decide(preflight_pod(job, result_message(error=fault), exit_code=2), job=job)
    assert gate.state == "running"
    assert "timed out" in gate.message


def test_the_newest_pod_of_a_job_has_the_last_word() -> None:
    job = preflight_job(state="Failed")
    old = preflight_pod(job, result_message(), created="2026-11-30T10:00:00Z")
    new = preflight_pod(job, result_message(error=FAULT), created="2026-11-30T11:00:00Z")
    assert decide(old, new, job=job).state == "failed"


def test_pods_of_an_earlier_job_of_the_same_name_do_not_count() -> None:
    earlier = preflight_job(state="Failed")
    earlier["metadata"]["uid"] = "another"
    assert decide(preflight_pod(earlier, result_message()), job=preflight_job()).state == "running"


@pytest.mark.parametrize(
    ("container", "message", "reason"),
    [
        pytest.param("fetch-target", "403 Forbidden", "FetchFailed", id="fetch"),
        pytest.param("preflight", "Traceback", "PreflightFailed", id="crash"),
        pytest.param("preflight", None, "PreflightFailed", id="no-message"),
    ],
)
def test_a_job_that_crashed_is_repeated_after_a_while(
    container: str, message: str | None, reason: str
) -> None:
    job = preflight_job(state="Failed")
    pod = preflight_pod(job, message, exit_code=137, container=container)
    gate = decide(pod, job=job)
    assert (gate.state, gate.reason) == ("failed", reason)
    assert gate.retry_after == RETRY_SECONDS
    assert not gate.is_repeat_due
    assert decide(pod, job=job, now="2026-11-30T12:06:00Z").is_repeat_due


def test_a_verdict_that_was_lost_with_its_pod_is_asked_for_again_soon() -> None:
    gate = decide(job=preflight_job(state="Complete"))
    assert gate.state == "failed"
    assert gate.retry_after is not None
    assert gate.retry_after < 10


def test_another_resources_job_of_the_same_pair_is_awaited() -> None:
    gate = decide(job=preflight_job(owner="other"))
    assert gate.state == "running"
    assert gate.job is None
    assert "other-preflight" in gate.message


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(preflight_job(owner="other", state="Failed"), id="failed"),
        pytest.param(preflight_job(owner="other", key="ffffffff"), id="other-pair"),
    ],
)
def test_another_resources_job_is_awaited_only_while_it_checks_this_pair(job: Object) -> None:
    assert decide(job=job).state == "missing"


def others_check(*, seconds: float) -> Object:
    """Another resource's Job, made so long ago."""
    made = datetime.datetime.fromisoformat(NOW) - datetime.timedelta(seconds=seconds)
    job = preflight_job(owner="other")
    job["metadata"]["creationTimestamp"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
    return job


def unfinished_pod(job: Object, **status: Any) -> Object:
    pod = preflight_pod(job, None)
    pod["status"] = {"phase": "Pending", **status}
    return pod


STARTED = {"state": {"running": {"startedAt": NOW}}}
NOT_STARTED = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({}, id="fits-no-node"),
        pytest.param({"containerStatuses": [{"name": "preflight", **NOT_STARTED}]}, id="no-image"),
        pytest.param({"phase": "Failed"}, id="failed-and-to-be-repeated"),
    ],
)
def test_another_resources_job_that_does_not_get_on_is_not_awaited_for_long(status: dict[str, Any]) -> None:
    new, old = others_check(seconds=PATIENCE_SECONDS - 1), others_check(seconds=PATIENCE_SECONDS)
    assert decide(unfinished_pod(new, **status), job=new).state == "running"
    assert decide(unfinished_pod(old, **status), job=old).state == "missing"
    assert decide(job=old).state == "missing", "no pod at all"


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"initContainerStatuses": [{"name": "fetch-target", **STARTED}]}, id="fetching"),
        pytest.param({"containerStatuses": [{"name": "preflight", **STARTED}]}, id="checking"),
        pytest.param({"phase": "Succeeded"}, id="with-a-verdict-about-to-be-kept"),
    ],
)
def test_another_resources_job_is_awaited_for_as_long_as_it_gets_on(status: dict[str, Any]) -> None:
    job = others_check(seconds=4 * 3600)
    assert decide(unfinished_pod(job, **status), job=job).state == "running"


@pytest.mark.parametrize(("seconds", "state"), [(0, "running"), (PATIENCE_SECONDS, "missing")])
def test_a_verdict_that_another_resource_does_not_record_is_not_awaited_for_long(
    seconds: float, state: str
) -> None:
    now = datetime.datetime.fromisoformat(NOW)
    job = preflight_job(owner="other", state="Complete", ended=NOW)
    seen = observed(jobs=(job,), pods=(preflight_pod(job, result_message()),))
    later = now + datetime.timedelta(seconds=seconds)
    assert decide_gate(KEY, record=None, observed=seen, now=later).state == state


def test_one_check_of_several_that_gets_on_is_enough() -> None:
    stuck, going = others_check(seconds=4000), preflight_job(owner="third")
    going["metadata"]["creationTimestamp"] = NOW
    seen = observed(jobs=(stuck, going))
    gate = decide_gate(KEY, record=None, observed=seen, now=datetime.datetime.fromisoformat(NOW))
    assert "third-preflight" in gate.message


def test_only_unfinished_checks_of_others_are_looked_into() -> None:
    other, own = preflight_job(owner="other"), preflight_job()
    assert checks_of_others(KEY, observed(jobs=(other,))) == [other]
    assert checks_of_others(KEY, observed(jobs=(other, own))) == [], "its own is what counts"
    assert checks_of_others(KEY, observed(jobs=(preflight_job(owner="other", state="Failed"),))) == []
