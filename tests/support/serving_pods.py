"""Real serving pods in tests: the server's image without torch, which is mounted from this environment."""

from __future__ import annotations

import sysconfig
from typing import Any

_VOLUME = "site-packages"


def host_torch() -> dict[str, Any]:
    """A podTemplate that gives serving pods the packages of this Python."""
    packages = sysconfig.get_paths()["purelib"]
    return {
        "volumes": [{"name": _VOLUME, "hostPath": {"path": packages, "type": "Directory"}}],
        "volumeMounts": [{"name": _VOLUME, "mountPath": "/opt/host-packages", "readOnly": True}],
        "env": [{"name": "PYTHONPATH", "value": "/opt/host-packages"}],
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
    }
