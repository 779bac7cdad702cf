"""The preflight gate: a pair of models is rolled out only once a Job has found that it can be served.

The verdict on a pair is kept in a ConfigMap under the pair's key, so that no pair is checked twice; until it
is there, the Job and its pods are the only state.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from draftline_operator.models.names import preflight_name
from draftline_operator.models.observed import Object, Observed, is_controlled_by, is_terminating
from draftline_operator.models.preflight import PreflightResult, parse_result
from draftline_operator.planning.pod_faults import find_fault

RETRY_SECONDS: Final = 300.0
"""After a failure that may pass, such as of a download. Deleting the Job repeats it at once."""
_LOST_RETRY_SECONDS: Final = 5.0
PATIENCE_SECONDS: Final = 60.0
"""With a Job of another resource that does nothing: as long as scheduling and starting usually take, or after
its end the recording of its verdict."""
_PASSING: Final = frozenset({"FetchFailed", "PreflightFailed"})
_MESSAGE_LIMIT: Final = 1024

GateState = Literal["missing", "running", "failed", "verified"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Whether the pair may be rolled out, and why not."""

    state: GateState
    pair_key: str
    reason: str
    message: str
    result: PreflightResult | None = None
    job: Object | None = None
    """This resource's own, of this pair."""
    is_recorded: bool = False
    has_begun: bool = True
    """Whether a container of the Job has ever run."""
    retry_after: float | None = None
    """Seconds until a failed Job is to be repeated; None: never by itself."""

    @property
    def is_open(self) -> bool:
        return self.state == "verified"

    @property
    def is_repeat_due(self) -> bool:
        return self.retry_after is not None and self.retry_after <= 0


def decide_gate(
    pair_key: str, *, record: PreflightResult | None, observed: Observed, now: datetime.datetime
) -> Gate:
    """`record` is what is kept of the pair; None where it was never found fit."""
    job = _own_job(observed, pair_key)
    if record is not None and record.error is None:
        return _verified(pair_key, record, job, is_recorded=True)
    if job is None:
        return _without_job(pair_key, observed, now)
    pods = _pods_of(job, observed.pods)
    result = _result(pods)
    if result is not None and result.error is None:
        return _verified(pair_key, result, job, is_recorded=False)
    if _finished(job, "Failed") is not None or _finished(job, "Complete") is not None:
        return _failed(pair_key, job, pods, result, now)
    return Gate(
        state="running",
        pair_key=pair_key,
        reason="PreflightRunning",
        message=_progress(pods, result),
        job=job,
        has_begun=any(map(_has_begun, pods)),
    )


def checks_of_others(pair_key: str, observed: Observed) -> list[Object]:
    """Jobs of others whose verdict on the pair may still be recorded; none where this one has its own."""
    if _own_job(observed, pair_key) is not None:
        return []
    return [
        job
        for job in observed.jobs
        if job["metadata"]["name"].endswith(preflight_name("", pair_key))
        if not is_controlled_by(job, observed.uid) and _may_be_recorded(job)
    ]


def awaiting(pair_key: str, message: str) -> Gate:
    """While another resource has the same pair checked: its verdict is awaited."""
    return Gate(state="running", pair_key=pair_key, reason="PreflightRunning", message=message)


def _own_job(observed: Observed, pair_key: str) -> Object | None:
    name = preflight_name(observed.name, pair_key)
    jobs = (job for job in observed.jobs if job["metadata"]["name"] == name)
    return next((job for job in jobs if is_controlled_by(job, observed.uid)), None)


def _without_job(pair_key: str, observed: Observed, now: datetime.datetime) -> Gate:
    """A Job of another resource is awaited as long as it gets on, and no longer.

    It may never: no node may fit its pod, or nobody have its image, for reasons that are not the pair's.
    """
    for job in checks_of_others(pair_key, observed):
        if _gets_on(job, observed.pods, now):
            return awaiting(pair_key, f"Job {job['metadata']['name']} checks the same pair")
    return Gate(
        state="missing",
        pair_key=pair_key,
        reason="PreflightPending",
        message="the models are about to be checked",
    )


def _verified(pair_key: str, result: PreflightResult, job: Object | None, *, is_recorded: bool) -> Gate:
    return Gate(
        state="verified",
        pair_key=pair_key,
        reason="Verified",
        message="files, tokenizers and sizes fit together",
        result=result,
        job=job,
        is_recorded=is_recorded,
    )


def _failed(
    pair_key: str, job: Object, pods: list[Object], result: PreflightResult | None, now: datetime.datetime
) -> Gate:
    if result is not None and result.error is not None:
        reason, message = result.error.reason, result.error.message
    else:
        reason, message = _failure(pods)
    retry_after = None
    if reason in _PASSING:
        wait = RETRY_SECONDS if pods else _LOST_RETRY_SECONDS
        retry_after = wait - _seconds_since_end(job, now)
    return Gate(
        state="failed",
        pair_key=pair_key,
        reason=reason,
        message=_one_line(message),
        result=result,
        job=job,
        retry_after=retry_after,
    )


def _failure(pods: list[Object]) -> tuple[str, str]:
    """What is known of a Job that ended without a result."""
    for pod in pods:
        for status in _container_statuses(pod):
            end: Mapping[str, Any] = (status.get("state") or {}).get("terminated") or {}
            if end.get("exitCode", 0) != 0:
                reason = "FetchFailed" if status["name"].startswith("fetch") else "PreflightFailed"
                why = end.get("message") or end.get("reason") or f"exit code {end['exitCode']}"
                return reason, f"{status['name']}: {why}"
        if message := pod.get("status", {}).get("message"):
            return "PreflightFailed", message
    return "PreflightFailed", "the Job ended without a result"


def _progress(pods: list[Object], result: PreflightResult | None) -> str:
    if result is not None and result.error is not None:
        return _one_line(f"will be tried again after {result.error.reason}: {result.error.message}")
    fault = find_fault(pods)
    return f"{fault.reason}: {fault.message}" if fault is not None else "the models are being checked"


def _result(pods: Iterable[Object]) -> PreflightResult | None:
    """Of the newest pod that has one."""
    for pod in pods:
        for status in pod.get("status", {}).get("containerStatuses") or ():  # never of those that fetch
            message = ((status.get("state") or {}).get("terminated") or {}).get("message")
            if message:
                try:
                    return parse_result(message)
                except ValueError:
                    continue  # of a crash
    return None


def _pods_of(job: Object, pods: Iterable[Object]) -> list[Object]:
    """Newest first."""
    own = [pod for pod in pods if is_controlled_by(pod, job["metadata"]["uid"])]
    return sorted(own, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)


def _container_statuses(pod: Object) -> Iterator[Mapping[str, Any]]:
    status = pod.get("status", {})
    yield from status.get("containerStatuses") or ()
    yield from status.get("initContainerStatuses") or ()


def _may_be_recorded(job: Object) -> bool:
    """Also of a complete one: its verdict is about to be, and then it is deleted."""
    return _finished(job, "Failed") is None and not is_terminating(job)


def _gets_on(job: Object, pods: Iterable[Object], now: datetime.datetime) -> bool:
    if _finished(job, "Complete") is not None:
        # Its resource may have become one that cannot be followed, and then nobody records it.
        return _seconds_since_end(job, now) < PATIENCE_SECONDS
    age = _seconds_since(job["metadata"].get("creationTimestamp"), now)
    is_new = age is None or age < PATIENCE_SECONDS
    return is_new or any(_does_something(pod) for pod in _pods_of(job, pods))


def _does_something(pod: Object) -> bool:
    """Whether it fetches or checks at this moment, or has just come to a verdict."""
    is_running = any("running" in (status.get("state") or {}) for status in _container_statuses(pod))
    return is_running or pod.get("status", {}).get("phase") == "Succeeded"


def _has_begun(pod: Object) -> bool:
    states = (status.get(key) or {} for status in _container_statuses(pod) for key in ("state", "lastState"))
    return any("running" in state or "terminated" in state for state in states)


def _finished(job: Object, kind: str) -> Mapping[str, Any] | None:
    conditions: list[Mapping[str, Any]] = job.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind and c.get("status") == "True"), None)


def _seconds_since_end(job: Object, now: datetime.datetime) -> float:
    condition = _finished(job, "Failed") or _finished(job, "Complete") or {}
    seconds = _seconds_since(condition.get("lastTransitionTime"), now)
    return seconds if seconds is not None else RETRY_SECONDS


def _seconds_since(stamp: Any, now: datetime.datetime) -> float | None:
    """None where it is no time."""
    try:
        return (now - datetime.datetime.fromisoformat(str(stamp))).total_seconds()
    except ValueError:
        return None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_LIMIT]
