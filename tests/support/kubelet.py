"""Plays the kubelet where a cluster has no node: pods become ready, and preflight pods tell a result.

Everything else is real: the API server, and the controllers that make pods of Deployments and Jobs. Pods that
were never bound to a node also leave at once when they are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from draftline_operator.cluster.client import ClusterClient
from draftline_operator.constants import COMPONENT_LABEL, PREFLIGHT
from draftline_operator.errors import ClusterError
from draftline_operator.models.kinds import POD
from draftline_operator.models.observed import Object, is_terminating
from draftline_operator.planning.deletion_cost import is_ready

DIGEST = f"sha256:{'a' * 64}"
_MODEL = {
    "architecture": "LlamaForCausalLM",
    "digest": f"sha256:{'b' * 64}",
    "weightsBytes": 1000,
    "kvBytesPerToken": 10,
    "maxContextLength": 2048,
}
_MEMORY = {
    "weightsBytes": 1000,
    "activationBytes": 100,
    "kvBytesPerToken": 10,
    "kvPoolBytes": 1000,
    "requiredBytes": 2100,
    "availableBytes": 4000,
    "fits": True,
}
FITS: dict[str, Any] = {"pairDigest": DIGEST, "target": _MODEL, "draft": _MODEL, "memory": _MEMORY}
MISMATCH: dict[str, Any] = {
    "error": {"reason": "PairMismatch", "message": "token 7 is 'a' in one and 'b' in the other"}
}


@dataclass(slots=True)
class Kubelet:
    """`step` brings all pods of a namespace as far as a kubelet would."""

    client: ClusterClient
    namespace: str
    preflight: dict[str, Any] = field(default_factory=lambda: FITS)
    """What preflight pods find out."""
    is_preflight_held: bool = False
    crashing: str | None = None
    """Serving pods of this image crash; None: all become ready."""
    address: str = "127.0.0.1"
    """Of all pods, where nothing answers unless a test sees to that."""
    only_on_nodes: bool = False
    """Whether pods that no node has taken stay as they are."""

    async def step(self) -> bool:
        """Whether anything was to be done."""
        pods = await self._pods()
        changes = [(pod, self._status(pod)) for pod in pods if not is_terminating(pod)]
        due = [(pod, status) for pod, status in changes if status is not None]
        for pod, status in due:
            name = pod["metadata"]["name"]
            await self.client.patch(POD, self.namespace, name, {"status": status}, subresource="status")
        return bool(due)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Steps all the time, beside the operator."""
        task = asyncio.create_task(self._step_for_ever())
        yield
        task.cancel()

    async def _step_for_ever(self) -> None:
        while True:
            with contextlib.suppress(ClusterError):  # while the API server is away, or the namespace gone
                await self.step()
            await asyncio.sleep(0.1)

    async def _pods(self) -> list[Object]:
        return await self.client.list(POD, self.namespace)

    def _status(self, pod: Object) -> dict[str, Any] | None:
        if self.only_on_nodes and "nodeName" not in pod["spec"]:
            return None
        if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == PREFLIGHT:
            return self._of_preflight(pod)
        image = pod["spec"]["containers"][0]["image"]
        if self.crashing is not None and image == self.crashing:
            return self._crashed(pod)
        return self._ready(pod)

    def _of_preflight(self, pod: Object) -> dict[str, Any] | None:
        if self.is_preflight_held or pod["status"].get("phase") in ("Succeeded", "Failed"):
            return None
        code = 2 if "error" in self.preflight else 0
        end = {"exitCode": code, "message": json.dumps(self.preflight), "finishedAt": _now()}
        return {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [_container(pod, {"terminated": end}, is_ready=False)],
        }

    def _ready(self, pod: Object) -> dict[str, Any] | None:
        if is_ready(pod) or pod["status"].get("phase") == "Failed":
            return None
        return {
            "phase": "Running",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "conditions": [_condition("Ready", "True"), _condition("ContainersReady", "True")],
            "containerStatuses": [_container(pod, {"running": {"startedAt": _now()}}, is_ready=True)],
        }

    def _crashed(self, pod: Object) -> dict[str, Any] | None:
        statuses = pod["status"].get("containerStatuses") or [{}]
        if statuses[0].get("lastState", {}).get("terminated"):
            return None
        status = _container(pod, {"waiting": {"reason": "CrashLoopBackOff"}}, is_ready=False)
        status["lastState"] = {"terminated": {"exitCode": 1, "finishedAt": _now()}}
        return {
            "phase": "Running",
            "conditions": [_condition("Ready", "False"), _condition("ContainersReady", "False")],
            "containerStatuses": [status],
        }


def _container(pod: Object, state: dict[str, Any], *, is_ready: bool) -> dict[str, Any]:
    container = pod["spec"]["containers"][0]
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": is_ready,
        "restartCount": 0,
        "state": state,
    }


def _condition(kind: str, status: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "lastTransitionTime": _now()}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
