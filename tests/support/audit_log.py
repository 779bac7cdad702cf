"""What the API server's audit log has of somebody's requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

WRITES = frozenset({"create", "update", "patch", "delete"})


@dataclass(frozen=True, slots=True)
class Request:
    """Times are Unix seconds, by the API server's clock."""

    user: str
    verb: str
    """An apply is a patch, and its `code` says whether it made the object: 201."""
    resource: str
    """With the subresource, such as pods/status."""
    name: str
    code: int
    began: float
    ended: float

    @property
    def is_write(self) -> bool:
        return self.verb in WRITES

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.name}"


def read_requests(audit_log: Path, *, user: str | None = None) -> list[Request]:
    """Of one user or of all, in the order in which they were answered."""
    lines = audit_log.read_text().splitlines()
    if user is not None:  # most lines are somebody else's, and JSON is slow
        quoted = json.dumps(user)
        lines = [line for line in lines if quoted in line]
    found = [_request(json.loads(line)) for line in lines]
    return [request for request in found if user in (None, request.user)]


def read_writes(audit_log: Path, user: str) -> list[Request]:
    """Of an operator: what it wrote beside its Lease."""
    requests = read_requests(audit_log, user=user)
    return [request for request in requests if request.is_write and request.resource != "leases"]


def first(requests: Sequence[Request]) -> float:
    """When the first of them came."""
    return min(request.began for request in requests)


def _request(event: dict[str, Any]) -> Request:
    what = event.get("objectRef") or {}
    return Request(
        user=event["user"]["username"],
        verb=event["verb"],
        resource="/".join(filter(None, (what.get("resource", ""), what.get("subresource")))),
        name=what.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        began=_seconds(event["requestReceivedTimestamp"]),
        ended=_seconds(event["stageTimestamp"]),
    )


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
