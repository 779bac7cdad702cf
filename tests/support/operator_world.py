"""A namespace of a real API server, in which a test is the user, the kubelet and whoever lets time pass."""

from __future__ import annotations

import asyncio
import copy
import datetime
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftline_operator.cluster.client import ClusterClient
from draftline_operator.cluster.interface import Cluster
from draftline_operator.constants import API_VERSION, KIND
from draftline_operator.handlers.registry import CHILDREN
from draftline_operator.models.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    POD,
    SPECULATIVE_DEPLOYMENT,
    Kind,
)
from draftline_operator.models.observed import Object, controller_of, is_terminating
from draftline_operator.models.resource import RenderSettings
from draftline_operator.planning.deletion_cost import is_ready
from draftline_operator.services.reconcile import Outcome, Surroundings, reconcile
from draftline_operator.testing import Killed, RecordingCluster
from support.kubelet import Kubelet
from support.speculative_deployments import PAIR

NAME = "chat"
CHILD_KINDS = tuple(kind for kind in CHILDREN if kind != POD)
SETTINGS = RenderSettings(
    default_image="registry.test/server:1", autoscaling_provider="builtin", has_hpa_tolerance=True
)


@dataclass(slots=True)
class KnownLoads:
    """In place of pods that answer: what each of them has in flight."""

    by_pod: dict[str, int] = field(default_factory=dict)

    async def refresh(self, namespace: str, pods: Iterable[Object]) -> Mapping[str, int | None]:
        return {pod["metadata"]["name"]: self.by_pod.get(pod["metadata"]["name"]) for pod in pods}


class MortalCluster(RecordingCluster):
    """Ends the process after so many writes, or after the first write of this verb and kind."""

    def __init__(
        self, cluster: Cluster, *, kill_after: int | None = None, kill_on: tuple[str, str] | None = None
    ) -> None:
        super().__init__(cluster, kill_after=kill_after)
        self._kill_on = kill_on

    def _after(self, verb: str, kind: Kind, namespace: str | None, name: str, written: Object | None) -> None:
        super()._after(verb, kind, namespace, name, written)
        if (verb, kind.kind) == self._kill_on:
            raise Killed


@dataclass(slots=True)
class World:
    client: ClusterClient
    namespace: str
    kubelet: Kubelet
    loads: KnownLoads = field(default_factory=KnownLoads)
    settings: RenderSettings = SETTINGS
    seconds_ahead: float = 0.0
    """By how much the operator's clock is ahead."""
    writes: list[tuple[str, str, str]] = field(default_factory=list)
    """Verb, kind and name of what the last reconcile wrote, also where it was killed."""

    # ----------------------------------------------------------------------------------------------- the user

    async def create(self, spec: dict[str, Any] | None = None, *, name: str = NAME) -> Object:
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": copy.deepcopy(spec if spec is not None else PAIR),
        }
        return await self.client.create(manifest)

    async def change(self, change: dict[str, Any], *, name: str = NAME) -> None:
        """A merge patch of the spec."""
        patched = await self.client.patch(SPECULATIVE_DEPLOYMENT, self.namespace, name, {"spec": change})
        assert patched is not None

    async def scale(self, replicas: int, *, name: str = NAME) -> None:
        """Through /scale, as `kubectl scale` and the autoscaler do."""
        change = {"spec": {"replicas": replicas}}
        await self.client.patch(SPECULATIVE_DEPLOYMENT, self.namespace, name, change, subresource="scale")

    async def delete(self, *, name: str = NAME) -> None:
        await self.client.delete(SPECULATIVE_DEPLOYMENT, self.namespace, name)

    async def get(self, kind: Kind, name: str = NAME) -> Object | None:
        return await self.client.get(kind, self.namespace, name)

    async def existing(self, kind: Kind, name: str = NAME) -> Object:
        found = await self.get(kind, name)
        assert found is not None, f"{kind} {name} does not exist"
        return found

    async def status(self, name: str = NAME) -> dict[str, Any]:
        body = await self.existing(SPECULATIVE_DEPLOYMENT, name)
        return dict(body.get("status") or {})

    async def conditions(self, name: str = NAME) -> dict[str, tuple[str, str]]:
        """Status and reason by type."""
        status = await self.status(name)
        return {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", [])}

    async def is_ready(self, name: str = NAME) -> bool:
        """By a status that is about the spec as it is now."""
        body = await self.existing(SPECULATIVE_DEPLOYMENT, name)
        status = body.get("status") or {}
        ready = [c["status"] for c in status.get("conditions", []) if c["type"] == "Ready"]
        return ready == ["True"] and status["observedGeneration"] == body["metadata"]["generation"]

    async def pods(self, kind: Kind = POD) -> list[Object]:
        return await self.client.list(kind, self.namespace)

    # ------------------------------------------------------------------------------------------- the operator

    def surroundings(self, cluster: Cluster) -> Surroundings:
        return Surroundings(
            cluster=cluster,
            loads=self.loads,
            settings=lambda: self.settings,
            optional_kinds=lambda: (),
            now=self._now,
        )

    def with_settings(self, **settings: Any) -> None:
        self.settings = replace(self.settings, **settings)

    async def reconcile(
        self, name: str = NAME, *, kill_after: int | None = None, kill_on: tuple[str, str] | None = None
    ) -> tuple[Outcome, list[tuple[str, str, str]]]:
        """Once; what was written comes with it."""
        cluster = MortalCluster(self.client, kill_after=kill_after, kill_on=kill_on)
        self.writes = cluster.writes
        outcome = await reconcile(self.namespace, name, self.surroundings(cluster))
        return outcome, cluster.writes

    async def settle(
        self,
        *names: str,
        seconds: float = 20.0,
        kill_after: int | None = None,
        kill_on: tuple[str, str] | None = None,
    ) -> None:
        """Lets operator, controllers and kubelet work until nobody has anything left to do for a while.

        Where the operator dies, after `kill_after` writes or `kill_on` such a write, that raises `Killed`.
        """
        deadline = time.monotonic() + seconds
        quiet = 0
        while quiet < 4:
            assert time.monotonic() < deadline, "it never came to rest"
            writes = 0
            for name in names or (NAME,):
                writes += len((await self.reconcile(name, kill_after=kill_after, kill_on=kill_on))[1])
            if kill_after is not None:
                kill_after -= writes
            has_stepped = await self.kubelet.step()
            is_busy = writes or has_stepped or await self._controllers_are_busy()
            quiet = 0 if is_busy else quiet + 1
            await asyncio.sleep(0.05)

    async def until(self, holds: Callable[[], Any], *, seconds: float = 10.0) -> None:
        """Waits for what somebody else does."""
        deadline = time.monotonic() + seconds
        while not await holds():
            assert time.monotonic() < deadline, "it never came to hold"
            await asyncio.sleep(0.05)

    async def look_undisturbed(self, times: int, name: str = NAME, *, seconds: float = 60.0) -> None:
        """Reconciles so many times while nobody else writes; such a look must find nothing to do."""
        deadline = time.monotonic() + seconds
        seen = await self._versions()
        await self.reconcile(name)
        while times:
            assert time.monotonic() < deadline, "somebody writes all the time"
            before = await self.status(name)
            _, writes = await self.reconcile(name)
            found = await self._versions()
            if found == seen:  # this look had nothing to read that the one before it had not
                assert writes == [], f"{before} became {await self.status(name)}"
                times -= 1
            else:
                seen = found
                await self.reconcile(name)

    async def _versions(self) -> dict[str, str]:
        """Of all that a look reads, without what only looks write."""
        listed = await asyncio.gather(*(self.client.list(kind, self.namespace) for kind in CHILDREN))
        return {
            item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for found in listed for item in found
        }

    async def _controllers_are_busy(self) -> bool:
        kinds = (SPECULATIVE_DEPLOYMENT, DEPLOYMENT, JOB, CONFIG_MAP, POD)
        listed = await asyncio.gather(*(self.client.list(kind, self.namespace) for kind in kinds))
        resources, deployments, jobs, config_maps, pods = listed
        owners = {found["metadata"]["uid"] for found in (*resources, *jobs)}
        return (
            any(_is_unseen(found) for found in deployments)
            or _num_ready(pods) != sum(d.get("status", {}).get("readyReplicas", 0) for d in deployments)
            or (not self.kubelet.is_preflight_held and any(_is_unfinished(job) for job in jobs))
            or any(_is_about_to_go(found, owners) for found in (*deployments, *jobs, *config_maps, *pods))
        )

    def _now(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.seconds_ahead)


def _num_ready(pods: Iterable[Object]) -> int:
    """Of Deployments."""
    return sum(is_ready(pod) for pod in pods if (controller_of(pod) or {}).get("kind") == "ReplicaSet")


def _is_about_to_go(found: Object, owners: Collection[str]) -> bool:
    """Because it, or its resource or Job, was deleted."""
    controller = controller_of(found) or {}
    return is_terminating(found) or (
        controller.get("kind") in (KIND, JOB.kind) and controller.get("uid") not in owners
    )


def _is_unfinished(job: Object) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return not any(c["type"] in ("Complete", "Failed") for c in conditions)


def _is_unseen(deployment: Object) -> bool:
    seen: int = deployment.get("status", {}).get("observedGeneration", 0)
    return seen < int(deployment["metadata"]["generation"])
