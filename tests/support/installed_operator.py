"""The operator as the chart runs it, as a process: its environment, and the rights of its ServiceAccount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.kube.components import INSIDE_SERVER
from support.kube.local import LocalCluster
from support.kube.sandbox import NODE_ADDRESS
from support.operator_process import OperatorProcess
from support.release import Release


@contextmanager
def installed_operator(
    cluster: LocalCluster, release: Release, log_file: Path, command: str = "run", **changed: str
) -> Iterator[OperatorProcess]:
    """In the cluster's network; `changed` are settings that differ from those that the chart gives it."""
    kubeconfig = release.kubeconfig_of_operator(cluster, INSIDE_SERVER, log_file.parent)
    settings = {
        "namespace": release.namespace,
        "pod_name": "operator-0",
        "kubeconfig": str(kubeconfig),
        "health_host": NODE_ADDRESS,
        "metrics_api_host": NODE_ADDRESS,
        **changed,
    }
    environment = {
        **os.environ,
        **release.environment(),
        **{f"DRAFTLINE_OPERATOR_{name.upper()}": value for name, value in settings.items()},
    }
    arguments = cluster.command_inside(sys.executable, "-m", "draftline_operator.main", command)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    try:
        yield OperatorProcess(process, log_file)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=10)
