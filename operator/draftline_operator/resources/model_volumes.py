"""Where a pod finds its models: volumes, mounts, the steps that fetch, and the paths that result.

pvc://CLAIM/PATH    the whole claim, read only, and the path within it: a missing folder is then a fault that
                    preflight can name, not a container that never starts, and links within the claim work
file:///PATH        that folder of the node, read only; only where the chart allows it
hf://, s3://        an init container that fetches into the model cache, a folder for each URI and revision
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from dataclasses import dataclass

from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.names import short_hash
from draftline_operator.models.preflight import PreflightModel, PreflightResult
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.models.spec import ModelSource, SpeculativeDeploymentSpec
from draftline_operator.resources import paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A step that brings a model into the cache; `secret` has its credentials."""

    name: str
    args: tuple[str, ...]
    secret: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVolumes:
    """Of one pod. Containers that use the models get `mounts`, read only; fetching ones `fetch_mounts`."""

    volumes: tuple[Manifest, ...]
    mounts: tuple[Manifest, ...]
    fetch_mounts: tuple[Manifest, ...]
    fetches: tuple[Fetch, ...]


def model_path(spec: SpeculativeDeploymentSpec, role: str) -> str:
    """The folder of one of `spec.models` inside the pods."""
    source = spec.models[role]
    if source.is_fetched:
        return f"{paths.MODEL_CACHE_DIRECTORY}/{_cache_key(source)}"
    if source.scheme == "file":
        return f"{paths.MODELS_DIRECTORY}/{role}"
    claim = _claim(source)
    root = paths.MODEL_CACHE_DIRECTORY if claim == _cache_claim(spec) else _claim_directory(claim)
    return posixpath.normpath(f"{root}/{_after_scheme(source).removeprefix(claim)}")


def model_volumes(
    resource: Resource, settings: RenderSettings, *, verified: PreflightResult | None = None
) -> ModelVolumes:
    """What a pod needs to have its models; raises `InvalidSpecError` for a file:// that is not allowed.

    What preflight `verified` is fetched by its commit and digest, however a branch has moved since.
    """
    spec = resource.spec
    for role, source in spec.models.items():
        if source.scheme == "file" and not settings.allow_host_path:
            raise InvalidSpecError(
                f"spec.{role}.model.uri",
                "file:// reads the node's disk, which this installation of the operator does not allow",
            )
    known = {"target": verified.target, "draft": verified.draft} if verified is not None else {}
    cache = {"name": paths.MODEL_CACHE_VOLUME, "mountPath": paths.MODEL_CACHE_DIRECTORY}
    volumes, mounts = _volumes_in_place(spec)
    return ModelVolumes(
        volumes=(*([_cache_volume(spec)] if spec.fetches_models else []), *volumes),
        mounts=(*([{**cache, "readOnly": True}] if spec.fetches_models else []), *mounts),
        fetch_mounts=(cache,) if spec.fetches_models else (),
        fetches=tuple(
            _fetch(role, source, model_path(spec, role), verified=known.get(role))
            for role, source in spec.models.items()
            if source.is_fetched
        ),
    )


def _cache_claim(spec: SpeculativeDeploymentSpec) -> str | None:
    """The claim of the model cache, where anything is fetched into it."""
    return spec.model_cache.persistent_volume_claim if spec.fetches_models else None


def _cache_volume(spec: SpeculativeDeploymentSpec) -> Manifest:
    claim, empty_dir = spec.model_cache.persistent_volume_claim, spec.model_cache.empty_dir
    if claim is not None:
        return {"name": paths.MODEL_CACHE_VOLUME, "persistentVolumeClaim": {"claimName": claim}}
    limit = {"sizeLimit": empty_dir.size_limit} if empty_dir and empty_dir.size_limit else {}
    return {"name": paths.MODEL_CACHE_VOLUME, "emptyDir": limit}


def _volumes_in_place(spec: SpeculativeDeploymentSpec) -> tuple[list[Manifest], list[Manifest]]:
    """Of models that are read where they are. A claim is mounted once, or a pod would never start."""
    volumes: dict[str, Manifest] = {}
    mounts: dict[str, Manifest] = {}
    for role, source in spec.models.items():
        if source.scheme == "pvc" and (claim := _claim(source)) != _cache_claim(spec):
            name = f"models-{short_hash(claim)}"
            volumes[name] = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            mounts[name] = {"mountPath": _claim_directory(claim)}
        elif source.scheme == "file":
            name = f"{role}-model"
            directory = posixpath.normpath(_after_scheme(source))
            volumes[name] = {"hostPath": {"path": directory, "type": "Directory"}}
            mounts[name] = {"mountPath": f"{paths.MODELS_DIRECTORY}/{role}"}
    return (
        [{"name": name, **volume} for name, volume in volumes.items()],
        [{"name": name, **mount, "readOnly": True} for name, mount in mounts.items()],
    )


def _fetch(role: str, source: ModelSource, path: str, *, verified: PreflightModel | None) -> Fetch:
    revision = (verified.revision if verified is not None else None) or source.revision
    digest = verified.digest if verified is not None else source.digest
    secret = source.credentials_secret_ref
    return Fetch(
        name=f"fetch-{role}",
        args=(
            "fetch",
            source.uri,
            *(("--revision", revision) if revision is not None else ()),
            *(("--digest", digest) if digest is not None else ()),
            *("--out", path),
        ),
        secret=secret.name if secret is not None else None,
    )


def _cache_key(source: ModelSource) -> str:
    """A folder for each URI and revision, with a name that a person recognizes."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", source.uri.rstrip("/").rpartition("/")[2])[:64].strip("-.")
    identity = f"{source.uri}\n{source.revision or ''}"
    return f"{stem or 'model'}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _claim(source: ModelSource) -> str:
    return _after_scheme(source).partition("/")[0]


def _claim_directory(claim: str) -> str:
    return f"{paths.MODELS_DIRECTORY}/pvc/{claim}"


def _after_scheme(source: ModelSource) -> str:
    return source.uri.partition("://")[2]
