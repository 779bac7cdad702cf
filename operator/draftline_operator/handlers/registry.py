"""Whatever happens to a resource or to a child of it is remembered, and puts the resource into the queue.

Only raw events are handled: kopf then writes nothing of its own, neither annotations nor a finalizer.
"""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import kopf

from draftline_operator.cluster.client import Credentials
from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.constants import INSTANCE_LABEL
from draftline_operator.models.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    JOB,
    NETWORK_POLICY,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    SPECULATIVE_DEPLOYMENT,
    Kind,
)
from draftline_operator.planning.events import fingerprint
from draftline_operator.services.worker import WorkQueue

CHILDREN: Final = (
    DEPLOYMENT,
    JOB,
    POD,
    HORIZONTAL_POD_AUTOSCALER,
    CONFIG_MAP,
    SERVICE,
    SERVICE_ACCOUNT,
    POD_DISRUPTION_BUDGET,
    NETWORK_POLICY,
)
SETTLING_SECONDS: Final = 1.0
"""How children fare is looked at so long after the first of its events: they come in bursts."""
_AWAITED: Final = (JOB,)
"""What holds up everything else until it ends."""
_CREDENTIALS_LAST: Final = datetime.timedelta(minutes=5)


def build_registry(
    queue: WorkQueue,
    memory: ObjectMemory,
    optional_kinds: Iterable[Kind],
    credentials: Callable[[], Awaitable[Credentials]],
) -> kopf.OperatorRegistry:
    """`optional_kinds` have to be installed, or kopf complains about them."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login(credentials))
    news = News(memory)
    kopf.on.event(*_address(SPECULATIVE_DEPLOYMENT), registry=registry)(on_resource(queue, news))
    for kind in (*CHILDREN, *optional_kinds):
        kopf.on.event(*_address(kind), registry=registry)(on_child(queue, news, kind))
    return registry


def watched_kinds(optional_kinds: Iterable[Kind]) -> list[Kind]:
    """All of which the memory is told."""
    return [SPECULATIVE_DEPLOYMENT, *CHILDREN, *optional_kinds]


def watched_children(optional_kinds: Iterable[Kind]) -> list[tuple[str, str, str]]:
    """Group, version and plural of what is watched by `OUR_LABELS`."""
    return [_address(kind) for kind in (*CHILDREN, *optional_kinds)]


class News:
    """Remembers all, and tells events that matter from those that only say how an object fares."""

    def __init__(self, memory: ObjectMemory) -> None:
        self._memory = memory
        self._seen: dict[str, str] = {}

    def is_news(self, kind: Kind, event: kopf.RawEvent) -> bool:
        body: Any = event["object"]
        uid = body["metadata"]["uid"]
        if event["type"] is None and uid in self._seen:  # listed anew: what was missed is not told
            self._memory.forget()
        self._memory.saw(kind, event["type"], body)
        if event["type"] == "DELETED":
            self._seen.pop(uid, None)
            return True
        found = fingerprint(body)
        if self._seen.get(uid) == found:
            return False
        self._seen[uid] = found
        return True


def on_resource(queue: WorkQueue, news: News) -> Callable[..., Awaitable[None]]:
    async def resource(event: kopf.RawEvent, namespace: str, name: str, **_: Any) -> None:
        if news.is_news(SPECULATIVE_DEPLOYMENT, event):
            queue.add((namespace, name))

    return resource


def on_child(queue: WorkQueue, news: News, kind: Kind) -> Callable[..., Awaitable[None]]:
    wait = 0.0 if kind in _AWAITED else SETTLING_SECONDS

    async def child(event: kopf.RawEvent, namespace: str, labels: kopf.Labels, **_: Any) -> None:
        if not news.is_news(kind, event):
            return
        if INSTANCE_LABEL in labels:
            queue.add((namespace, labels[INSTANCE_LABEL]), after=wait)
        else:  # the record of a pair, which others may wait for
            queue.add_namespace(namespace)

    return child


def _login(
    credentials: Callable[[], Awaitable[Credentials]],
) -> Callable[..., Awaitable[kopf.ConnectionInfo]]:
    async def login(**_: Any) -> kopf.ConnectionInfo:
        found = await credentials()
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path,
            insecure=found.is_insecure,
            certificate_path=found.certificate_path,
            private_key_path=found.key_path,
            scheme="Bearer" if found.token else None,
            token=found.token,
            proxy_url=found.proxy,
            expiration=datetime.datetime.now(datetime.UTC) + _CREDENTIALS_LAST,
        )

    return login


def _address(kind: Kind) -> tuple[str, str, str]:
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural
