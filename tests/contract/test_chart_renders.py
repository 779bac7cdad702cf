"""What the chart renders, text for text, so that every change of it is seen in review.

After an intended change `DRAFTLINE_WRITE_RENDERS=1 make test` writes the files in `renders/` anew; without
the variable nothing is ever written. The CRD is left out: it is compared with the canonical one elsewhere.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.helm import render_text

RENDERS = Path(__file__).parent / "renders"
WRITE = "DRAFTLINE_WRITE_RENDERS"
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
    path, text = RENDERS / f"{name}.yaml", rendered(VALUES[name])
    if os.environ.get(WRITE) == "1":
        path.write_text(text)
    known = path.read_text()
    lines = difflib.unified_diff(known.splitlines(), text.splitlines(), "known", "rendered", lineterm="")
    assert known == text, "\n".join([*lines, f"an intended change is written with {WRITE}=1"])


def test_there_is_no_render_that_nobody_compares() -> None:
    assert {path.stem for path in RENDERS.iterdir()} == VALUES.keys()
