"""The operator's metrics API alone, as a process: its loads come from a file that a test writes.

    python serve_metrics_api.py KUBECONFIG NAMESPACE SERVICE HOST PORT LOADS

LOADS is JSON: {"NAMESPACE/NAME": {"waiting": 20, "running": 0}}; what is not in it is unknown.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from draftline_operator.cluster.client import ClusterClient, load_configuration
from draftline_operator.log import configure_logging
from draftline_operator.models.load import ResourceLoad
from draftline_operator.services.metrics_api import MetricsApi, MetricsApiSettings


class FileLoads:
    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, namespace: str, name: str) -> ResourceLoad | None:
        load = json.loads(self._path.read_text()).get(f"{namespace}/{name}")
        return ResourceLoad(**load, sampled_at=time.time()) if load is not None else None


async def serve(kubeconfig: str, namespace: str, service: str, host: str, port: str, loads: str) -> None:
    settings = MetricsApiSettings(
        namespace=namespace, service=service, secret=service, host=host, port=int(port)
    )
    async with ClusterClient(await load_configuration(kubeconfig)) as cluster:
        api = MetricsApi(cluster=cluster, loads=FileLoads(Path(loads)), settings=settings, clock=time.time)
        await api.run()


if __name__ == "__main__":
    configure_logging(level="info", log_format="text")
    asyncio.run(serve(*sys.argv[1:]))
