"""Reads all that one reconcile looks at, in one round trip's time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from draftline_operator.cluster.interface import Cluster
from draftline_operator.constants import (
    APP_NAME,
    COMPONENT_LABEL,
    FIELD_MANAGER,
    INSTANCE_LABEL,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    PREFLIGHT,
    REVISION_LABEL,
)
from draftline_operator.errors import ForbiddenError
from draftline_operator.models.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    JOB,
    NETWORK_POLICY,
    NODE,
    POD,
    POD_DISRUPTION_BUDGET,
    SCALED_OBJECT,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    SERVICE_MONITOR,
    Kind,
)
from draftline_operator.models.names import headless_service_name, serving_name
from draftline_operator.models.observed import ChildKey, Object, Observed
from draftline_operator.models.quantity import parse_quantity

ACCELERATOR_MEMORY_LABEL: Final = "nvidia.com/gpu.memory"
"""Of nodes, by NVIDIA's feature discovery: MiB of one accelerator."""
# Kinds of other projects, which may be absent.
OPTIONAL_KINDS: Final = (SERVICE_MONITOR, SCALED_OBJECT)


def selector(component: str, *, name: str | None = None) -> str:
    """Label selector of a component's objects, of one resource or of all."""
    labels = {NAME_LABEL: APP_NAME, COMPONENT_LABEL: component}
    if name is not None:
        labels[INSTANCE_LABEL] = name
    return ",".join(f"{key}={value}" for key, value in labels.items())


async def observe(cluster: Cluster, body: Object, *, optional_kinds: Iterable[Kind]) -> Observed:
    """Names are read one by one, for whatever has a child's name matters, ours or not."""
    namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
    instance = f"{NAME_LABEL}={APP_NAME},{INSTANCE_LABEL}={name}"
    named, config_maps, jobs, pods, own_autoscalers, others_autoscalers = await asyncio.gather(
        _read_named(cluster, namespace, _child_keys(name, optional_kinds)),
        cluster.list(CONFIG_MAP, namespace, labels=instance),
        _list_jobs(cluster, namespace),
        cluster.list(POD, namespace, labels=instance),
        cluster.list(
            HORIZONTAL_POD_AUTOSCALER, namespace, labels=f"{instance},{MANAGED_BY_LABEL}={FIELD_MANAGER}"
        ),
        # Whoever scales our pods beside us; those of our other resources would be a long list.
        cluster.list(HORIZONTAL_POD_AUTOSCALER, namespace, labels=f"{MANAGED_BY_LABEL}!={FIELD_MANAGER}"),
    )
    autoscalers = [*own_autoscalers, *others_autoscalers]
    own = {
        (HORIZONTAL_POD_AUTOSCALER, found["metadata"]["name"]): found
        for found in autoscalers
        if found["metadata"]["name"] == serving_name(name)
    }
    return Observed(
        uid=body["metadata"]["uid"],
        name=name,
        status=body.get("status") or {},
        named={**named, **own},
        config_maps=tuple(config_maps),
        jobs=tuple(jobs),
        pods=tuple(pods),
        autoscalers=tuple(autoscalers),
    )


async def observe_name(
    cluster: Cluster, observed: Observed, namespace: str, kind: Kind, name: str
) -> Observed:
    """The same with one more object, where it exists."""
    found = await cluster.get(kind, namespace, name)
    return observed if found is None else observed.with_object(kind, found)


async def _list_jobs(cluster: Cluster, namespace: str) -> list[Object]:
    return await cluster.list(JOB, namespace, labels=selector(PREFLIGHT))


async def observe_jobs(cluster: Cluster, observed: Observed, namespace: str) -> Observed:
    """The same with the preflight Jobs as they are now."""
    return replace(observed, jobs=tuple(await _list_jobs(cluster, namespace)))


async def observe_checks(cluster: Cluster, observed: Observed, namespace: str, pair_key: str) -> Observed:
    """The same with the pods of other resources' Jobs of the pair, too."""
    pods = await cluster.list(POD, namespace, labels=f"{selector(PREFLIGHT)},{REVISION_LABEL}={pair_key}")
    known = {pod["metadata"]["uid"] for pod in observed.pods}
    others = (pod for pod in pods if pod["metadata"]["uid"] not in known)
    return replace(observed, pods=(*observed.pods, *others))


async def hash_secrets(cluster: Cluster, namespace: str, names: Iterable[str]) -> dict[str, str | None]:
    """A hash of each Secret's values; None where it does not exist. The values themselves stay here."""
    unique = sorted(set(names))
    secrets = await asyncio.gather(*(cluster.get(SECRET, namespace, name) for name in unique))
    return {name: _hash(secret) for name, secret in zip(unique, secrets, strict=True)}


async def accelerator_memory(cluster: Cluster, node_selector: Mapping[str, str]) -> int | None:
    """Bytes of the smallest accelerator of the nodes that pods may run on; None where nobody says."""
    labels = ",".join([ACCELERATOR_MEMORY_LABEL, *(f"{key}={value}" for key, value in node_selector.items())])
    try:
        nodes = await cluster.list(NODE, None, labels=labels, is_cached=True)
    except ForbiddenError:  # rights that somebody else wrote may leave nodes out
        return None
    sizes = [node["metadata"]["labels"][ACCELERATOR_MEMORY_LABEL] for node in nodes]
    return min((int(parse_quantity(size)) * 2**20 for size in sizes if size.isdigit()), default=None)


def _child_keys(name: str, optional_kinds: Iterable[Kind]) -> list[ChildKey]:
    kinds = (DEPLOYMENT, SERVICE, SERVICE_ACCOUNT, POD_DISRUPTION_BUDGET, NETWORK_POLICY, *optional_kinds)
    return [*((kind, serving_name(name)) for kind in kinds), (SERVICE, headless_service_name(name))]


async def _read_named(cluster: Cluster, namespace: str, keys: list[ChildKey]) -> dict[ChildKey, Object]:
    objects = await asyncio.gather(*(cluster.get(kind, namespace, name) for kind, name in keys))
    return {key: found for key, found in zip(keys, objects, strict=True) if found is not None}


def _hash(secret: Mapping[str, Any] | None) -> str | None:
    if secret is None:
        return None
    data = secret.get("data") or {}
    text = "\n".join(f"{key}={data[key]}" for key in sorted(data))
    return hashlib.sha256(text.encode()).hexdigest()
