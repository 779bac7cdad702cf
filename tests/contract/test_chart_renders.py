"""What the chart renders. The CRD is left out: it is compared with the canonical one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.helm import render_text
from support.renders import assert_all_compared, assert_known

RENDERS = Path(__file__).parent / "renders" / "chart"
EVERY_OPTION: dict[str, Any] = {
    "fullnameOverride": "speculation",
    "replicas": 2,
    "image": {"registry": "mirror:5000", "tag": "edge", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "serving": {
        "image": {"registry": "mirror:5000", "digest": f"sha256:{'0' * 64}", "pullPolicy": "Always"},
        "allowHostPath": True,
        "networkPolicy": False,
        "serviceMonitor": False,
        "serviceMonitorLabels": {"release": "prometheus", "team": "ml"},
    },
    "crds": {"keep": False},
    "autoscaling": {
        "provider": "builtin",
        "metricsApi": {"port": 9443, "groupPriorityMinimum": 200, "versionPriority": 300},
    },
    "serviceAccount": {"name": "operator", "annotations": {"cloud/identity": "x"}},
    "log": {"level": "debug", "format": "text"},
    "healthPort": 8081,
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "ml"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "infra", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"},
    ],
    "priorityClassName": "system-cluster-critical",
    "monitoring": {"kind": "ServiceMonitor", "interval": "10s", "labels": {"release": "prometheus"}},
    "networkPolicy": {"apiServerPorts": [8443]},
}
VALUES: dict[str, Mapping[str, Any]] = {
    "default": {},
    "namespaced": {"scope": "namespaced", "watchNamespaces": ["team-a", "team-b"]},
    "every-option": EVERY_OPTION,
}


def rendered(values: Mapping[str, Any]) -> str:
    documents = render_text(values).split("\n---\n")
    return "\n---\n".join(d for d in documents if "/templates/crds/" not in d)


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_renders_what_it_did(name: str) -> None:
    assert_known(RENDERS / f"{name}.yaml", rendered(VALUES[name]))


def test_there_is_no_render_that_nobody_compares() -> None:
    assert_all_compared(RENDERS, VALUES)
