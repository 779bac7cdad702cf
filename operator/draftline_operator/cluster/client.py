"""The cluster over HTTP: addresses, authentication and TLS by kubernetes_asyncio, everything else plain JSON.

The library's typed models are left alone: they drop fields that they do not know, and cost most of the
time of a call.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from kubernetes_asyncio import client as kubernetes
from kubernetes_asyncio import config
from kubernetes_asyncio.config import ConfigException

from draftline_operator.cluster.interface import Subresource
from draftline_operator.constants import FIELD_MANAGER
from draftline_operator.errors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    NotLeadingError,
    OperatorError,
    RejectedError,
)
from draftline_operator.models.kinds import Kind, kind_of
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest

REQUEST_TIMEOUT_SECONDS: Final = 5.0
_LIST_LIMIT: Final = 500
_APPLY, _MERGE, _JSON = (
    "application/apply-patch+yaml",
    "application/merge-patch+json",
    "application/json",
)
Query = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """How this process reaches the API server at this moment, for others that talk to it."""

    server: str
    ca_path: str | None
    certificate_path: str | None
    key_path: str | None
    token: str | None = field(repr=False)
    is_insecure: bool
    proxy: str | None


async def load_configuration(kubeconfig: str | None) -> kubernetes.Configuration:
    """From the given file, else from the pod that we run in, else from where kubectl looks."""
    configuration = kubernetes.Configuration()
    try:
        if kubeconfig is None:
            try:
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            except ConfigException:
                await config.load_kube_config(client_configuration=configuration)
        else:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise ClusterError(f"no configuration of a cluster was found: {error}") from error
    return configuration


class _FencedBody(aiohttp.BytesPayload):
    """A request's body that is sent only if it still may be when the moment comes.

    Between the decision to write and the first byte lie turns of the event loop, in which a process may be
    frozen; what had been decided before would else leave when it wakes.
    """

    def __init__(self, data: bytes, may_write: Callable[[], bool]) -> None:
        super().__init__(data)
        self._may_write = may_write

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        if not self._may_write():
            raise NotLeadingError
        await super().write_with_length(writer, content_length)


class ClusterClient:
    """Implements `Cluster`. One for the whole process; close it at the end."""

    def __init__(
        self, configuration: kubernetes.Configuration, *, timeout: float = REQUEST_TIMEOUT_SECONDS
    ) -> None:
        self._api = kubernetes.ApiClient(configuration)
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._may_write: Callable[[], bool] | None = None

    def fenced(self, may_write: Callable[[], bool]) -> Self:
        """The same client, whose writes leave only while they may; asked when they leave."""
        view = copy.copy(self)
        view._may_write = may_write
        return view

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def credentials(self) -> Credentials:
        configuration = self._api.configuration
        header = await configuration.get_api_key_with_prefix("BearerToken")
        return Credentials(
            server=configuration.host or "",
            ca_path=configuration.ssl_ca_cert,
            certificate_path=configuration.cert_file,
            key_path=configuration.key_file,
            token=header.removeprefix("Bearer ") if header else None,
            is_insecure=not configuration.verify_ssl,
            proxy=configuration.proxy,
        )

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return await self._request("GET", _path(kind, namespace, name), is_missing_fine=True)

    async def serves(self, kind: Kind) -> bool:
        document = await self._request("GET", f"/apis/{kind.api_version}", is_missing_fine=True)
        return any(found["name"] == kind.plural for found in (document or {}).get("resources", ()))

    async def minor_version(self) -> int:
        version = await self._request("GET", "/version")
        return int("".join(filter(str.isdigit, _present(version)["minor"])))  # some clouds say 34+

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> list[Object]:
        query = {"labelSelector": labels} if labels else {}
        if is_cached:
            page = await self._request(
                "GET", _path(kind, namespace), {**query, "resourceVersion": "0"}, is_missing_fine=True
            )
            return _items(page, kind)
        found: list[Object] = []
        token = ""
        while True:
            paging = {"limit": str(_LIST_LIMIT), **({"continue": token} if token else {})}
            page = await self._request(
                "GET", _path(kind, namespace), {**query, **paging}, is_missing_fine=True
            )
            found.extend(_items(page, kind))
            token = page["metadata"].get("continue", "") if page else ""
            if not token:
                return found

    async def create(self, manifest: Manifest) -> Object:
        path = _path(kind_of(manifest), manifest["metadata"].get("namespace"))
        query = {"fieldManager": FIELD_MANAGER}
        return _present(await self._request("POST", path, query, body=manifest))

    async def replace(self, manifest: Manifest) -> Object:
        metadata = manifest["metadata"]
        path = _path(kind_of(manifest), metadata.get("namespace"), metadata["name"])
        replaced = await self._request(
            "PUT", path, {"fieldManager": FIELD_MANAGER}, body=manifest, is_missing_fine=True
        )
        if replaced is None:
            raise ConflictError(f"{manifest['kind']} {metadata['name']} is gone")
        return replaced

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        metadata = manifest["metadata"]
        path = _path(kind_of(manifest), metadata.get("namespace"), metadata["name"])
        query = {"fieldManager": field_manager or FIELD_MANAGER, "force": "true"}
        return _present(await self._request("PATCH", path, query, body=manifest, content_type=_APPLY))

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: Subresource | None = None,
    ) -> Object | None:
        path = _path(kind, namespace, name, subresource)
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request(
            "PATCH", path, query, body=change, content_type=_MERGE, is_missing_fine=True
        )

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> None:
        known = {"uid": uid, "resourceVersion": resource_version}
        preconditions = {key: value for key, value in known.items() if value is not None}
        body = {
            "propagationPolicy": "Background",
            **({"preconditions": preconditions} if preconditions else {}),
        }
        await self._request("DELETE", _path(kind, namespace, name), body=body, is_missing_fine=True)

    async def _request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = _JSON,
        is_missing_fine: bool = False,
    ) -> Object | None:
        headers = {"Accept": _JSON, "Content-Type": content_type}
        data = None if body is None else self._data(body)
        try:
            await self._api.update_params_for_auth(headers, [], ["BearerToken"])
            response = await self._api.rest_client.pool_manager.request(
                method,
                f"{self._api.configuration.host}{path}",
                params=dict(query or {}),
                data=data,
                headers=headers,
                timeout=self._timeout,
            )
            async with response:
                status, text = response.status, await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError, ConfigException) as error:
            raise ClusterError(f"{method} {path}: {type(error).__name__} {error}".rstrip()) from error
        if status == 404 and is_missing_fine:
            return None
        if status >= 400:
            raise _failure(status, _message(text) or f"{method} {path}: status {status}")
        return _document(text)

    def _data(self, body: Mapping[str, Any]) -> bytes | _FencedBody:
        data = json.dumps(body, separators=(",", ":")).encode()
        return data if self._may_write is None else _FencedBody(data, self._may_write)


def _path(kind: Kind, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
    prefix = "/apis/" if "/" in kind.api_version else "/api/"
    parts = [kind.api_version]
    if namespace is not None and kind.is_namespaced:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(kind.plural)
    parts += [quote(part, safe="") for part in (name, subresource) if part is not None]
    return prefix + "/".join(parts)


def _items(page: Object | None, kind: Kind) -> list[Object]:
    """Each of them says its kind, which lists leave out."""
    items = page["items"] if page is not None else ()
    return [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in items]


def _document(text: str) -> Object:
    try:
        document: Object = json.loads(text)
    except ValueError as error:
        raise ClusterError("the API server's answer is not JSON") from error
    return document


def _message(text: str) -> str:
    """Of a Status document, in one line."""
    try:
        message = json.loads(text).get("message", "")
    except (ValueError, AttributeError):
        message = text[:200]
    return " ".join(str(message).split())


def _failure(status: int, message: str) -> OperatorError:
    match status:
        case 403:
            return ForbiddenError(message)
        case 409:
            return ConflictError(message)
        case 400 | 413 | 415 | 422:
            return RejectedError(message)
        case _:
            return ClusterError(message)


def _present(found: Object | None) -> Object:
    assert found is not None  # a missing one has raised
    return found
