"""What keeps pods from running, as one reason for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftline_operator.models.observed import Object, is_alive

_BROKEN: Final = frozenset(
    {
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
_SHOWN_CHARACTERS: Final = 300
# One name for states that a container changes between while nothing changes for its owner.
_SAME: Final = {"ErrImagePull": "ImagePullBackOff", "ErrImageNeverPull": "ImagePullBackOff"}


@dataclass(frozen=True, slots=True)
class PodFault:
    """The worst of what was found."""

    reason: str
    message: str
    is_passing: bool = False
    """Whether it may well resolve itself, as nodes come and go."""


def find_fault(pods: Iterable[Object]) -> PodFault | None:
    """Of pods that are to stay; None where all run or are on their way."""
    staying = [pod for pod in pods if is_alive(pod)]
    faults = [
        fault for pod in staying for fault in (_container_fault(pod) or _scheduling_fault(pod),) if fault
    ]
    return min(faults, key=lambda fault: (fault.is_passing, fault.reason), default=None)


def _unschedulable(pod: Object) -> Mapping[str, Any] | None:
    """What the scheduler says of a pod that it cannot place."""
    conditions: Iterable[Mapping[str, Any]] = pod.get("status", {}).get("conditions") or ()
    found = (c for c in conditions if c.get("type") == "PodScheduled" and c.get("reason") == "Unschedulable")
    return next(found, None)


def _container_fault(pod: Object) -> PodFault | None:
    for status in _container_statuses(pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        end = (status.get("lastState") or {}).get("terminated") or {}
        if reason in _BROKEN and not end:
            return PodFault(_SAME.get(reason, reason), f"container {status['name']} cannot start")
        # Between two crashes a container runs for a moment; to its owner that is the same crash.
        if end.get("exitCode", 0) != 0 and not status.get("ready", False):
            return PodFault("CrashLoopBackOff", f"container {status['name']} ended: {_end(end)}")
    return None


def _scheduling_fault(pod: Object) -> PodFault | None:
    condition = _unschedulable(pod)
    if condition is None:
        return None
    short = _short_resources(pod, condition.get("message", ""))
    missing = f"no node has {', '.join(short)} to spare" if short else "no node fits"
    has_accelerator = any("/" in resource for resource in short)
    return PodFault("InsufficientGPU" if has_accelerator else "Unschedulable", missing, is_passing=True)


def _short_resources(pod: Object, message: str) -> list[str]:
    """Resources that the scheduler calls insufficient, of those that the pod asks for."""
    asked: set[str] = set()
    for container in pod["spec"].get("containers") or ():
        resources = container.get("resources") or {}
        asked |= {*(resources.get("requests") or {}), *(resources.get("limits") or {})}
    return sorted(resource for resource in asked if f"Insufficient {resource}" in message)


def _container_statuses(pod: Object) -> Iterator[Mapping[str, Any]]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _end(end: Mapping[str, Any]) -> str:
    """With the server's last words where these are the one line of a start that failed: other lines differ
    each time."""
    code = f"exit code {end.get('exitCode')}"
    reason = end.get("reason", "Error")
    known = code if reason == "Error" else f"{reason}, {code}"
    last = (end.get("message") or "").rstrip().rpartition("\n")[2]
    return f"{known}, {last[:_SHOWN_CHARACTERS]}" if last.startswith("error: ") else known
