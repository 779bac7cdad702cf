"""The ConfigMap with the server's configuration file: immutable, and named by what is in it.

A pod that restarts during a rollout so reads the file it was made for. The preflight Job reads the one that
is rendered without a pair digest, since it is what finds the digest out.
"""

from __future__ import annotations

import yaml

from draftline_operator.models.names import config_map_name, short_hash
from draftline_operator.models.resource import Manifest, Resource
from draftline_operator.resources import paths
from draftline_operator.resources.labels import object_metadata
from draftline_operator.resources.server_config import server_config


def config_text(resource: Resource, *, pair_digest: str | None) -> str:
    """The file."""
    return yaml.safe_dump(server_config(resource, pair_digest=pair_digest), sort_keys=False)


def config_hash(resource: Resource, *, pair_digest: str | None) -> str:
    """Of the file."""
    return short_hash(config_text(resource, pair_digest=pair_digest))


def render_config_map(resource: Resource, *, pair_digest: str | None) -> Manifest:
    text = config_text(resource, pair_digest=pair_digest)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(resource, config_map_name(resource.name, short_hash(text))),
        "immutable": True,
        "data": {paths.CONFIG_FILE: text},
    }
