"""When the autoscaler wrote a resource's /scale, by the API server's audit log."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from support.serving_pods import ServingPods

AUTOSCALER = "horizontal-pod-autoscaler"


def scale_writes(serving: ServingPods) -> list[float]:
    """Of the autoscaler, as Unix times."""
    times = []
    for line in serving.cluster.audit_log.read_text(errors="replace").splitlines():
        # Most lines are something else, and JSON is slow.
        if '"subresource":"scale"' not in line or AUTOSCALER not in line:
            continue
        entry = json.loads(line)
        what = entry["objectRef"]
        is_ours = what.get("namespace") == serving.namespace and what.get("name") == serving.name
        if is_ours and entry["verb"] in ("update", "patch") and entry["responseStatus"]["code"] == 200:
            times.append(_unix_time(entry["requestReceivedTimestamp"]))
    return times


def _unix_time(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
