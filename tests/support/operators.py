"""Operators of a test, each under a user name of its own, by which the audit log knows it."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from draftline_operator.models.kinds import LEASE
from support.audit_log import Request, read_requests, read_writes
from support.kube.local import LocalCluster
from support.operator_process import OperatorProcess, running_operator
from support.operator_world import World

LEASE_NAME = "draftline-operator"


@dataclass(frozen=True, slots=True)
class Operators:
    cluster: LocalCluster
    world: World
    folder: Path
    """For their logs."""

    def start(self, name: str = "operator", **flags: str | float) -> AbstractContextManager[OperatorProcess]:
        """A process, with these settings beside those that all have."""
        kubeconfig = self.cluster.kubeconfig_for(self._user(name), ["system:masters"])
        log_file = self.folder / f"{name}.log"
        return running_operator(kubeconfig, self.world.namespace, log_file, pod_name=name, **flags)

    def writes(self, name: str = "operator") -> list[Request]:
        """What it has written until now, its Lease aside."""
        return read_writes(self.cluster.audit_log, self._user(name))

    def reads(self, name: str = "operator") -> list[Request]:
        """What it has asked for until now; a watch is none, and neither is its Lease."""
        requests = read_requests(self.cluster.audit_log, user=self._user(name))
        return [r for r in requests if r.verb in ("get", "list") and r.resource != "leases"]

    async def leader(self, *names: str) -> str:
        """Which of these leads, once one of them does."""
        for _ in range(300):
            lease = await self.world.get(LEASE, LEASE_NAME)
            holder = str(lease["spec"].get("holderIdentity", "")) if lease is not None else ""
            for name in names:
                if holder.startswith(f"{name}_"):
                    return name
            await asyncio.sleep(0.1)
        raise AssertionError("nobody leads")

    async def expire_lease(self) -> None:
        """As if its time were over: the next one need not wait for that."""
        change = {"spec": {"holderIdentity": ""}}
        await self.world.client.patch(LEASE, self.world.namespace, LEASE_NAME, change)

    def _user(self, name: str) -> str:
        return f"{name}-{self.world.namespace}"


async def wait_until_it_leads(operator: OperatorProcess) -> None:
    await asyncio.to_thread(operator.wait_for, "became the leader")
