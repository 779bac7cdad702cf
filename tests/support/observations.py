"""Objects as the API server shows them to the operator, for tests of what it decides."""

from __future__ import annotations

import json
from typing import Any

from draftline_operator.constants import COMPONENT_LABEL, INSTANCE_LABEL, NAME_LABEL
from draftline_operator.models.observed import Object, Observed

UID = "uid-1"
NAME = "chat"
KEY = "0123abcd"
NOW = "2026-11-30T12:00:00Z"


def observed(**parts: Any) -> Observed:
    """Of a resource that has nothing yet, but for what is given."""
    return Observed(uid=UID, name=NAME, **parts)


def owned(kind: str, name: str, *, uid: str = UID, owner: str = NAME, **parts: Any) -> Object:
    """An object that the resource controls."""
    reference = {"kind": "SpeculativeDeployment", "name": owner, "uid": uid, "controller": True}
    metadata = {"name": name, "uid": f"uid-of-{name}", "ownerReferences": [reference]}
    return {"kind": kind, "metadata": {**metadata, **parts.pop("metadata", {})}, **parts}


def foreign(kind: str, name: str) -> Object:
    return {"kind": kind, "metadata": {"name": name, "uid": f"uid-of-{name}"}}


def preflight_job(*, state: str = "", ended: str = NOW, key: str = KEY, owner: str = NAME) -> Object:
    """`state` is Complete, Failed or, while it runs, nothing."""
    uid = UID if owner == NAME else f"uid-of-{owner}"
    conditions = [{"type": state, "status": "True", "lastTransitionTime": ended}] if state else []
    return owned("Job", f"{owner}-preflight-{key}", uid=uid, owner=owner, status={"conditions": conditions})


def preflight_pod(
    job: Object, message: str | None, *, exit_code: int = 0, container: str = "preflight", created: str = NOW
) -> Object:
    """One that has ended, with a termination message."""
    end = {"exitCode": exit_code, **({"message": message} if message is not None else {})}
    return {
        "metadata": {
            "name": f"pod-{created}",
            "creationTimestamp": created,
            "ownerReferences": [{"kind": "Job", "uid": job["metadata"]["uid"], "controller": True}],
        },
        "spec": {"containers": [{"name": container}]},
        "status": {
            "phase": "Failed" if exit_code else "Succeeded",
            "containerStatuses": [{"name": container, "state": {"terminated": end}}],
        },
    }


def result_message(**parts: Any) -> str:
    """What the Job says of a pair; of one that fits where nothing is given."""
    return json.dumps({"pairDigest": f"sha256:{'a' * 64}", **parts})


def serving_pod(name: str, *, is_ready: bool = True, is_leaving: bool = False, **parts: Any) -> Object:
    labels = {NAME_LABEL: "draftline", INSTANCE_LABEL: NAME, COMPONENT_LABEL: "server"}
    leaving = {"deletionTimestamp": NOW} if is_leaving else {}
    status = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
    }
    metadata = {"name": name, "namespace": "models", "uid": f"uid-of-{name}", "labels": labels, **leaving}
    return {
        "kind": "Pod",
        "metadata": {**metadata, **parts.pop("metadata", {})},
        "spec": {"containers": [{"name": "server"}], **parts.pop("spec", {})},
        "status": {**status, **parts.pop("status", {})},
    }


def deployment(
    *, replicas: int = 2, updated: int = 2, available: int = 2, total: int | None = None, **metadata: Any
) -> Object:
    """One that the Deployment controller has seen; all is rolled out where nothing is given."""
    return owned(
        "Deployment",
        NAME,
        metadata={"generation": 1, **metadata},
        spec={
            "replicas": replicas,
            "selector": {"matchLabels": {INSTANCE_LABEL: NAME}},
            "template": {"metadata": {"labels": {}}, "spec": {"volumes": []}},
        },
        status={
            "observedGeneration": 1,
            "replicas": total if total is not None else max(replicas, updated),
            "updatedReplicas": updated,
            "readyReplicas": available,
            "availableReplicas": available,
        },
    )
