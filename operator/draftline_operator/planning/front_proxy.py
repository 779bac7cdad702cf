"""Who calls an aggregated API: the API server says so in headers, and proves itself by a certificate. Pure.

What to trust is published by the API server in kube-system/extension-apiserver-authentication.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from draftline_operator.models.kinds import SUBJECT_ACCESS_REVIEW
from draftline_operator.models.resource import Manifest

AUTHENTICATION_NAMESPACE: Final = "kube-system"
AUTHENTICATION_CONFIG_MAP: Final = "extension-apiserver-authentication"


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """How to tell the API server from everybody else, and how it names its callers."""

    ca: str
    """PEM of the authorities of its client certificate."""
    allowed_names: frozenset[str]
    """Common names that it may have; empty: any."""
    username_headers: tuple[str, ...] = ("X-Remote-User",)
    uid_headers: tuple[str, ...] = ()
    group_headers: tuple[str, ...] = ("X-Remote-Group",)
    extra_prefixes: tuple[str, ...] = ("X-Remote-Extra-",)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever asked the API server."""

    username: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


def parse_front_proxy(data: Mapping[str, str]) -> FrontProxy:
    """From the ConfigMap's data; raises ValueError where the aggregation layer is not set up."""
    ca = data.get("requestheader-client-ca-file", "")
    if "BEGIN CERTIFICATE" not in ca:
        raise ValueError("the API server has no requestheader-client-ca-file: its aggregation layer is off")
    return FrontProxy(
        ca=ca,
        allowed_names=frozenset(_names(data, "requestheader-allowed-names")),
        username_headers=_names(data, "requestheader-username-headers"),
        uid_headers=_names(data, "requestheader-uid-headers"),
        group_headers=_names(data, "requestheader-group-headers"),
        extra_prefixes=_names(data, "requestheader-extra-headers-prefix"),
    )


def identify(
    proxy: FrontProxy, *, common_name: str | None, headers: Iterable[tuple[str, str]]
) -> Caller | None:
    """The caller that the headers name; None where the connection's certificate does not make them credible.

    `common_name` is that of a certificate already verified against `proxy.ca`, or None without one.
    """
    if common_name is None or (proxy.allowed_names and common_name not in proxy.allowed_names):
        return None
    received = [(name.lower(), value) for name, value in headers]
    username = _first(received, proxy.username_headers)
    if not username:
        return None
    groups = tuple(value for name in proxy.group_headers for value in _all(received, name))
    return Caller(
        username, _first(received, proxy.uid_headers), groups, _extra(received, proxy.extra_prefixes)
    )


def access_review(caller: Caller, attributes: Mapping[str, str]) -> Manifest:
    """Asks whether `caller` may do what `attributes` say."""
    return {
        "apiVersion": SUBJECT_ACCESS_REVIEW.api_version,
        "kind": SUBJECT_ACCESS_REVIEW.kind,
        "metadata": {},
        "spec": {
            "user": caller.username,
            "uid": caller.uid,
            "groups": list(caller.groups),
            "extra": {key: list(values) for key, values in caller.extra},
            "resourceAttributes": dict(attributes),
        },
    }


def _names(data: Mapping[str, str], key: str) -> tuple[str, ...]:
    found = json.loads(data.get(key) or "[]")
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{key} of the API server is no list of names")
    return tuple(found)


def _all(received: list[tuple[str, str]], wanted: str) -> list[str]:
    return [value for name, value in received if name == wanted.lower()]


def _first(received: list[tuple[str, str]], wanted: Iterable[str]) -> str:
    return next((value for name in wanted for value in _all(received, name) if value), "")


def _extra(
    received: list[tuple[str, str]], prefixes: Iterable[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    extra: dict[str, list[str]] = {}
    for prefix in prefixes:
        for name, value in received:
            if name.startswith(prefix.lower()):
                extra.setdefault(unquote(name[len(prefix) :]), []).append(value)
    return tuple((key, tuple(values)) for key, values in sorted(extra.items()))
