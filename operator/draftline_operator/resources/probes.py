"""Probes of the serving container, all on the admin port: they ask the engine, not just the process.

The startup probe holds the others back until the models are loaded, however long that takes within the
budget. A server that hangs says so on /healthz after its own patience; then it is ended quickly, because
there is no stream left to spare.
"""

from __future__ import annotations

import math
from typing import Any

from draftline_operator.models.spec import SpeculativeDeploymentSpec

_STARTUP_PERIOD_SECONDS = 5
_HUNG_GRACE_SECONDS = 30


def startup_budget_seconds(spec: SpeculativeDeploymentSpec) -> int:
    """What the startup probe really waits for, at least."""
    return _startup_attempts(spec) * _STARTUP_PERIOD_SECONDS


def probes(spec: SpeculativeDeploymentSpec) -> dict[str, Any]:
    """Fields of the container."""
    return {
        "startupProbe": {
            **_get("/readyz"),
            "periodSeconds": _STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": _startup_attempts(spec),
            "terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS,
        },
        "readinessProbe": {
            **_get("/readyz"),
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            **_get("/healthz"),
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 3,
            "terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS,
        },
    }


def _startup_attempts(spec: SpeculativeDeploymentSpec) -> int:
    return math.ceil(spec.serving.startup_timeout_seconds / _STARTUP_PERIOD_SECONDS)


def _get(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "admin"}}
