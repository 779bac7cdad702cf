"""Whatever happens to a resource or to a child of it puts the resource into the queue, and does nothing else.

Only raw events are handled: kopf then writes nothing of its own, neither annotations nor a finalizer.
"""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import kopf

from draftline_operator.cluster.client import Credentials
from draftline_operator.constants import (
    APP_NAME,
    FIELD_MANAGER,
    INSTANCE_LABEL,
    MANAGED_BY_LABEL,
    NAME_LABEL,
)
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
OUR_LABELS: Final = f"{NAME_LABEL}={APP_NAME},{MANAGED_BY_LABEL}={FIELD_MANAGER}"
_CREDENTIALS_LAST: Final = datetime.timedelta(minutes=5)


def build_registry(
    queue: WorkQueue, optional_kinds: Iterable[Kind], credentials: Callable[[], Awaitable[Credentials]]
) -> kopf.OperatorRegistry:
    """`optional_kinds` have to be installed, or kopf complains about them."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login(credentials))
    news = _News()
    kopf.on.event(*_address(SPECULATIVE_DEPLOYMENT), registry=registry)(_on_resource(queue, news))
    for kind in (*CHILDREN, *optional_kinds):
        kopf.on.event(*_address(kind), registry=registry)(_on_child(queue, news))
    return registry


def watched_children(optional_kinds: Iterable[Kind]) -> list[tuple[str, str, str]]:
    """Group, version and plural of what is watched by `OUR_LABELS`."""
    return [_address(kind) for kind in (*CHILDREN, *optional_kinds)]


class _News:
    """Tells events that matter from those that only say how an object fares."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def is_news(self, event: kopf.RawEvent) -> bool:
        body: Any = event["object"]
        uid = body["metadata"]["uid"]
        if event["type"] == "DELETED":
            self._seen.pop(uid, None)
            return True
        found = fingerprint(body)
        if self._seen.get(uid) == found:
            return False
        self._seen[uid] = found
        return True


def _on_resource(queue: WorkQueue, news: _News) -> Callable[..., Awaitable[None]]:
    async def resource(event: kopf.RawEvent, namespace: str, name: str, **_: Any) -> None:
        if news.is_news(event):
            queue.add((namespace, name))

    return resource


def _on_child(queue: WorkQueue, news: _News) -> Callable[..., Awaitable[None]]:
    async def child(event: kopf.RawEvent, namespace: str, labels: kopf.Labels, **_: Any) -> None:
        if not news.is_news(event):
            return
        if INSTANCE_LABEL in labels:
            queue.add((namespace, labels[INSTANCE_LABEL]))
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
