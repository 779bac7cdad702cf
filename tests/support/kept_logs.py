"""The logs of a test cluster outlive it where a test fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.kube.components import Options
from support.kube.local import LocalCluster, local_cluster

kept_logs = pytest.StashKey[list[Path]]()


@contextmanager
def recorded_cluster(session: pytest.Session, options: Options | None = None) -> Iterator[LocalCluster]:
    """A cluster; its logs are kept where a test fails while it runs."""
    failed_before = session.testsfailed
    with local_cluster(options) as cluster:
        try:
            yield cluster
        finally:
            if session.testsfailed > failed_before:
                _keep_logs(session.config, cluster)


def _keep_logs(config: pytest.Config, cluster: LocalCluster) -> None:
    kept = config.rootpath / ".cache" / "cluster-logs" / cluster.sandbox.name
    for part in (cluster.logs, cluster.pod_logs):
        if part.is_dir():  # without a node there are no pods
            shutil.copytree(part, kept / part.name, symlinks=True, ignore_dangling_symlinks=True)
    config.stash.setdefault(kept_logs, []).append(kept)
