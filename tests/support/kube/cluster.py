"""A cluster as tests see it: a kubeconfig and kubectl, wherever it runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.kube.errors import ClusterFailed

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Cluster:
    """Where a cluster is and how to talk to it as its administrator."""

    kubeconfig: Path
    kubectl_path: Path

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints; a failure raises with what it says."""
        result = self.try_kubectl(*arguments, stdin=stdin)
        if result.returncode != 0:
            raise ClusterFailed(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def try_kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """The same, for what is expected to fail."""
        command = [str(self.kubectl_path), "--kubeconfig", str(self.kubeconfig), *arguments]
        return subprocess.run(command, input=stdin or "", capture_output=True, text=True, check=False)

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get`, as a document."""
        document: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return document

    def apply(self, *manifests: Manifest, namespace: str = "default") -> None:
        """Applies documents on the server's side."""
        self.kubectl(
            *("apply", "--server-side", "--namespace", namespace, "--filename=-"), stdin=_as_list(manifests)
        )

    def delete(self, *manifests: Manifest, namespace: str = "default") -> None:
        """Deletes what documents name, and waits until it is gone."""
        self.kubectl(
            *("delete", "--ignore-not-found", "--namespace", namespace, "--filename=-"),
            stdin=_as_list(manifests),
        )

    def wait(self, condition: str, *what: str, namespace: str = "default", seconds: int = 60) -> None:
        """`kubectl wait`, for a condition such as `condition=Ready` or `jsonpath=...`."""
        self.kubectl("wait", f"--for={condition}", *what, "--namespace", namespace, f"--timeout={seconds}s")


def _as_list(manifests: Iterable[Manifest]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
