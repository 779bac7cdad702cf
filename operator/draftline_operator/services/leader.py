"""Which of several operators acts: the holder of a Lease.

Times are those of client-go. What counts of another holder's Lease is how long we have seen it unchanged, by
our own clock, never the time that it says: clocks of machines differ. What counts of our own is when we began
the last renewal that succeeded.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from draftline_operator.cluster.interface import Cluster
from draftline_operator.errors import ConflictError, OperatorError
from draftline_operator.log import log_event
from draftline_operator.models.kinds import LEASE
from draftline_operator.models.observed import Object

LEASE_SECONDS: Final = 15
"""After so long without a renewal others may take it."""
# Shares of that. We stop writing well before, so that a write under way ends before others begin.
_DEADLINE: Final = 0.6
_RETRY: Final = 2 / 15

_logger = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Somebody else may act by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseIdentity:
    namespace: str
    name: str
    holder: str


class Leadership:
    """One process' view of the Lease."""

    def __init__(
        self,
        cluster: Cluster,
        identity: LeaseIdentity,
        *,
        monotonic: Callable[[], float],
        now: Callable[[], datetime.datetime],
        lease_seconds: int = LEASE_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._monotonic = monotonic
        self._now = now
        self._lease_seconds = lease_seconds
        self._renewed_at: float | None = None
        self._seen: tuple[str, float] | None = None
        """Resource version of somebody else's Lease, and when we saw it first."""

    def is_leader(self) -> bool:
        """Whether we may write at this moment."""
        renewed_at = self._renewed_at
        return renewed_at is not None and self._monotonic() - renewed_at < _DEADLINE * self._lease_seconds

    async def acquire(self) -> None:
        """Waits until the Lease is ours."""
        while not await self._try():  # noqa: ASYNC110 - what is awaited happens in the cluster
            await asyncio.sleep(_RETRY * self._lease_seconds)
        log_event(_logger, logging.INFO, "became the leader", holder=self._identity.holder)

    async def hold(self) -> None:
        """Renews it until it is lost, and then raises `LeaseLost`."""
        while self.is_leader():
            await asyncio.sleep(_RETRY * self._lease_seconds)
            await self._try()
        self._renewed_at = None
        raise LeaseLost(f"Lease {self._identity.name} was not renewed in time")

    async def release(self) -> None:
        """So that the next one need not wait. Whatever fails here, the Lease expires."""
        if not self.is_leader():
            return
        self._renewed_at = None
        try:
            lease = await self._read()
            if lease is not None and _holder(lease) == self._identity.holder:
                lease["spec"]["holderIdentity"] = ""
                await self._cluster.replace(_strip(lease))
        except OperatorError as error:
            log_event(_logger, logging.INFO, "Lease was not released", error=str(error))

    async def _try(self) -> bool:
        """Takes or renews the Lease; False where it is somebody else's or the API server does not say."""
        began = self._monotonic()
        try:
            lease = await self._read()
            if lease is None:
                await self._cluster.create(self._fresh())
            elif _holder(lease) == self._identity.holder or self._is_free(lease):
                await self._cluster.replace(self._taken(lease))
            else:
                self._renewed_at = None
                return False
        except ConflictError:
            return False
        except OperatorError as error:
            log_event(_logger, logging.WARNING, "Lease could not be renewed", error=str(error))
            return False
        self._renewed_at, self._seen = began, None
        return True

    async def _read(self) -> Object | None:
        return await self._cluster.get(LEASE, self._identity.namespace, self._identity.name)

    def _is_free(self, lease: Object) -> bool:
        if not _holder(lease):
            return True
        version = lease["metadata"]["resourceVersion"]
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, self._monotonic())
        duration: int = lease["spec"].get("leaseDurationSeconds", self._lease_seconds)
        return self._monotonic() - self._seen[1] > duration

    def _fresh(self) -> Object:
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"namespace": self._identity.namespace, "name": self._identity.name},
            "spec": self._spec(transitions=0, acquired=self._stamp()),
        }

    def _taken(self, lease: Object) -> Object:
        spec: dict[str, Any] = lease.get("spec") or {}
        is_ours = spec.get("holderIdentity") == self._identity.holder
        transitions = spec.get("leaseTransitions", 0) + (0 if is_ours else 1)
        acquired = spec.get("acquireTime") if is_ours else None
        return {
            **_strip(lease),
            "spec": self._spec(transitions=transitions, acquired=acquired or self._stamp()),
        }

    def _spec(self, *, transitions: int, acquired: str) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity.holder,
            "leaseDurationSeconds": self._lease_seconds,
            "acquireTime": acquired,
            "renewTime": self._stamp(),
            "leaseTransitions": transitions,
        }

    def _stamp(self) -> str:
        return self._now().astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _holder(lease: Object) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""


def _strip(lease: Object) -> Object:
    """A GET names its kind, but lists of managed fields are the API server's."""
    metadata = {key: value for key, value in lease["metadata"].items() if key != "managedFields"}
    return {**lease, "metadata": metadata}
