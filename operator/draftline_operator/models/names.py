"""Names of children: deterministic, and short enough for every limit of Kubernetes (63 characters)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

MAX_NAME_LENGTH = 44
"""Of a resource: the preflight Job's name is the longest derived one. The CRD says the same."""
KEY_LENGTH = 8


def short_hash(document: Any) -> str:
    """The first digits of the SHA-256 of canonical JSON: equal documents, equal names."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def serving_name(name: str) -> str:
    """Of the Deployment, the client Service and all other children that there is one of."""
    return name


def headless_service_name(name: str) -> str:
    return f"{name}-pods"


def config_map_name(name: str, config_hash: str) -> str:
    """One for each content, so that a pod that restarts during a rollout reads its own."""
    return f"{name}-config-{config_hash}"


def preflight_name(name: str, pair_key: str) -> str:
    return f"{name}-preflight-{pair_key}"


def pair_record_name(pair_key: str) -> str:
    """Of the ConfigMap that keeps a pair's preflight result, shared by all resources of the namespace."""
    return f"draftline-pair-{pair_key}"
