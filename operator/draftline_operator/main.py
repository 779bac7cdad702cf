"""The command line of the operator, and the place where its parts are put together.

    draftline-operator run                       until it is told to stop
    draftline-operator unregister-metrics-api    before it is uninstalled

Every replica scrapes pods, serves /metrics and, where it is registered, the metrics API. Only the one that
holds the Lease watches, reconciles and writes; when it cannot renew the Lease it ends, and is started again
as one that stands by.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftline_operator.cluster.client import REQUEST_TIMEOUT_SECONDS, ClusterClient, load_configuration
from draftline_operator.cluster.interface import Cluster
from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.cluster.pods import PodScraper
from draftline_operator.cluster.remembering import RememberedCluster, RememberingCluster
from draftline_operator.errors import OperatorError
from draftline_operator.handlers.registry import watched_kinds
from draftline_operator.handlers.watch import watch
from draftline_operator.log import configure_logging, log_event
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.planning.api_service_ownership import MetricsApiState, ServiceReference
from draftline_operator.services.capabilities import Capabilities
from draftline_operator.services.fence import FencedCluster
from draftline_operator.services.figures import write_figures
from draftline_operator.services.health import HealthServer
from draftline_operator.services.leader import Leadership, LeaseIdentity, LeaseLost
from draftline_operator.services.load import LoadCache
from draftline_operator.services.metrics_api import MetricsApi, MetricsApiSettings, unregister
from draftline_operator.services.reconcile import Outcome, Surroundings, reconcile
from draftline_operator.services.resync import resync
from draftline_operator.services.worker import WorkQueue, work
from draftline_operator.settings import ENVIRONMENT_PREFIX, Settings, load_settings

EXIT_OK, EXIT_FAILED, EXIT_WRONG_SETTINGS = 0, 1, 2
_STARTUP_RETRY_SECONDS = 2.0

_logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = build_parser().parse_args(argv)
    flags = {
        name: value for name, value in vars(arguments).items() if name != "command" and value is not None
    }
    command: Any = arguments.command
    try:
        settings = load_settings(flags, os.environ)
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG_SETTINGS
    configure_logging(level=settings.log_level, log_format=settings.log_format)
    try:
        code: int = asyncio.run(command(settings))
        return code
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_OK


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftline-operator",
        description="Turns SpeculativeDeployments into serving pods.",
        epilog=f"Every flag can be given as a variable: --health-port is {ENVIRONMENT_PREFIX}HEALTH_PORT.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command, text in (
        ("run", run, "run the operator until it is told to stop"),
        (
            "unregister-metrics-api",
            unregister_metrics_api,
            "delete the APIServices that lead to the operator",
        ),
    ):
        subparser = commands.add_parser(name, help=text, description=text, epilog=parser.epilog)
        subparser.set_defaults(command=command)
        for field, info in Settings.model_fields.items():
            subparser.add_argument(
                f"--{field.replace('_', '-')}", dest=field, metavar="VALUE", help=_help(info)
            )
    return parser


def _help(info: Any) -> str:
    has_default = info.default not in (None, (), {})
    return f"{info.description} (default: {info.default})" if has_default else str(info.description)


async def unregister_metrics_api(settings: Settings) -> int:
    """What the chart runs before it is uninstalled."""
    if settings.metrics_api_service is None:
        return EXIT_OK
    configuration = await load_configuration(settings.kubeconfig)
    async with ClusterClient(configuration) as cluster:
        reference = ServiceReference(settings.namespace, settings.metrics_api_service)
        for name in await unregister(cluster, reference):
            log_event(_logger, logging.INFO, "deleted an APIService", name=name)
    return EXIT_OK


async def run(settings: Settings) -> int:
    """Returns an exit code: a lost Lease is a failure, so that whoever started us starts us again."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with _build(settings) as operator:
        return await operator.run(stop)


@dataclass(slots=True, kw_only=True)
class Operator:
    """All parts of one process."""

    settings: Settings
    cluster: ClusterClient
    metrics: OperatorMetrics
    loads: LoadCache
    capabilities: Capabilities
    leadership: Leadership
    metrics_api: MetricsApi | None
    queue: WorkQueue
    is_ready: bool = False

    async def run(self, stop: asyncio.Event) -> int:
        health = HealthServer(loads=self.loads, metrics=self.metrics, is_ready=lambda: self.is_ready)
        port = await health.start(self.settings.health_host, self.settings.health_port)
        log_event(_logger, logging.INFO, "started", health_port=port)
        code = EXIT_OK
        try:
            await self._run(stop)
        except* LeaseLost:
            log_event(_logger, logging.ERROR, "Lease was lost")
            code = EXIT_FAILED
        finally:
            await self.leadership.release()
            await health.stop()
        return code

    async def _run(self, stop: asyncio.Event) -> None:
        """Whichever task ends first ends all: each of them is to run for ever."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._act(stop)), group.create_task(stop.wait())]
            tasks += [group.create_task(task) for task in self._always()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    def _always(self) -> list[Coroutine[Any, Any, Any]]:
        """What every replica does, leading or not."""
        tasks: list[Coroutine[Any, Any, Any]] = [self.loads.run(self.settings.scrape_seconds)]
        if self.metrics_api is not None:
            tasks.append(self.metrics_api.run())
        return tasks

    async def _act(self, stop: asyncio.Event) -> None:
        """What only the leader does."""
        await self._look_at_cluster()
        self.is_ready = True
        await self.leadership.acquire()
        self.metrics.is_leader.set(1)
        settings, namespaces = self.settings, self.settings.watch_namespaces
        is_leader = self.leadership.is_leader
        optional_kinds = self.capabilities.optional_kinds()
        memory = ObjectMemory(watched_kinds(optional_kinds))
        fenced = FencedCluster(self.cluster.fenced(is_leader), is_leader, self.metrics)
        cluster = RememberingCluster(fenced, memory)
        reconciler = self._reconciler(cluster, RememberedCluster(cluster, memory))
        stop_watching = asyncio.Event()
        leading: list[Coroutine[Any, Any, Any]] = [
            self.leadership.hold(),
            work(self.queue, reconciler, self.metrics, tasks=settings.concurrency),
            resync(cluster, self.queue, memory, namespaces, interval=settings.resync_seconds),
            write_figures(cluster, self.loads, namespaces, interval=settings.figures_seconds),
            self.capabilities.follow(settings.resync_seconds),
            watch(
                self.queue,
                memory,
                namespaces=namespaces,
                optional_kinds=optional_kinds,
                credentials=self.cluster.credentials,
                stop=stop_watching,
            ),
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(task) for task in leading]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # Also where one of them raised: cancelled without it, kopf kills the process after a while.
                stop_watching.set()
            for task in tasks:
                task.cancel()

    async def _look_at_cluster(self) -> None:
        while True:
            try:
                await self.capabilities.look()
                return
            except OperatorError as error:
                log_event(_logger, logging.WARNING, "cluster was not reached", error=str(error))
                await asyncio.sleep(_STARTUP_RETRY_SECONDS)

    def _reconciler(self, cluster: Cluster, remembered: Cluster) -> Any:
        surroundings = Surroundings(
            cluster=cluster,
            remembered=remembered,
            loads=self.loads,
            settings=self.capabilities.render_settings,
            optional_kinds=self.capabilities.optional_kinds,
            now=_now,
            metrics_api=self._metrics_api_state,
        )

        async def reconcile_one(namespace: str, name: str, failures: int) -> Outcome:
            return await reconcile(namespace, name, surroundings, failures=failures)

        return reconcile_one

    def _metrics_api_state(self) -> MetricsApiState | None:
        return self.metrics_api.state() if self.metrics_api is not None else None


@contextlib.asynccontextmanager
async def _build(settings: Settings) -> AsyncIterator[Operator]:
    """Puts the parts together; connections are closed at the end."""
    configuration = await load_configuration(settings.kubeconfig)
    timeout = min(REQUEST_TIMEOUT_SECONDS, settings.lease_seconds / 3)
    metrics = OperatorMetrics()
    async with ClusterClient(configuration, timeout=timeout) as cluster, PodScraper(time.time) as scraper:
        loads = LoadCache(
            cluster,
            scraper,
            namespaces=settings.watch_namespaces,
            clock=time.time,
            metrics=metrics,
        )
        yield Operator(
            settings=settings,
            cluster=cluster,
            metrics=metrics,
            loads=loads,
            capabilities=Capabilities(cluster, settings),
            leadership=Leadership(
                cluster,
                _identity(settings, os.environ),
                monotonic=time.monotonic,
                now=_now,
                lease_seconds=settings.lease_seconds,
            ),
            metrics_api=_metrics_api(settings, cluster, loads),
            queue=WorkQueue(time.monotonic),
        )


def _identity(settings: Settings, environment: Mapping[str, str]) -> LeaseIdentity:
    """Never the same twice, also where a container starts again in its pod."""
    host = settings.pod_name or environment.get("HOSTNAME") or socket.gethostname()
    holder = f"{host}_{uuid.uuid4().hex[:8]}"
    return LeaseIdentity(namespace=settings.namespace, name=settings.lease_name, holder=holder)


def _metrics_api(settings: Settings, cluster: ClusterClient, loads: LoadCache) -> MetricsApi | None:
    if settings.metrics_api_service is None or settings.metrics_api_secret is None:
        return None
    return MetricsApi(
        cluster=cluster,
        loads=loads,
        settings=MetricsApiSettings(
            namespace=settings.namespace,
            service=settings.metrics_api_service,
            secret=settings.metrics_api_secret,
            host=settings.metrics_api_host,
            port=settings.metrics_api_port,
        ),
        clock=time.time,
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


if __name__ == "__main__":
    sys.exit(main())
