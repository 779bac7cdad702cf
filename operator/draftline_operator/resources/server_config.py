"""The server's configuration file, as it follows from the spec. The keys are those of the server itself."""

from __future__ import annotations

import math
from typing import Any

from draftline_operator import constants
from draftline_operator.models.quantity import parse_quantity
from draftline_operator.models.resource import Resource
from draftline_operator.models.spec import DraftSpec, SpeculativeDeploymentSpec, TargetSpec
from draftline_operator.resources.model_volumes import model_path

_CONTEXT_OVERFLOW = {"Reject": "reject", "TruncateLeft": "truncate_left"}
_METHODS = {"NGram": "ngram", "DraftModel": "draft_model"}


def server_config(resource: Resource, *, pair_digest: str | None) -> dict[str, Any]:
    """Every value that the spec decides is spelled out, so that a newer server's defaults change nothing."""
    spec = resource.spec
    return {
        "service_name": resource.name,
        "device": "cpu" if spec.accelerator is None else "cuda",
        "server": _server(spec),
        "models": models_config(spec) | _given(expected_pair_digest=pair_digest),
        "inference": inference_config(spec),
        "speculative_decoding": speculation_config(spec),
    }


def models_config(spec: SpeculativeDeploymentSpec) -> dict[str, Any]:
    """A draft model that never runs is left out, and then need not be there."""
    draft = spec.draft if spec.uses_draft_model else None
    return {
        "target_model": _model(spec.target, model_path(spec, "target")),
        **({"draft_model": _model(draft, model_path(spec, "draft"))} if draft is not None else {}),
    }


def inference_config(spec: SpeculativeDeploymentSpec) -> dict[str, Any]:
    serving = spec.serving
    pool = serving.kv_cache_memory
    return {
        "context_overflow": _CONTEXT_OVERFLOW[serving.context_overflow],
        "max_tokens_per_request": serving.max_tokens_per_request,
        "max_batched_tokens": serving.max_batched_tokens,
        "memory_fraction": serving.memory_fraction,
        **_given(
            max_context_length=serving.max_context_length,
            kv_cache_memory=math.ceil(parse_quantity(pool)) if pool is not None else None,
        ),
    }


def speculation_config(spec: SpeculativeDeploymentSpec) -> dict[str, Any]:
    speculation = spec.speculation
    return {
        "enabled": speculation.enabled,
        "methods": [_METHODS[method] for method in speculation.methods],
        "num_speculative_tokens": speculation.num_speculative_tokens,
        "max_batch_size": speculation.max_batch_size,
        "adaptive": speculation.adaptive,
        "fallback_to_standard_decoding": speculation.fallback_to_standard_decoding,
        **_given(min_acceptance_rate=speculation.min_acceptance_rate),
    }


def _server(spec: SpeculativeDeploymentSpec) -> dict[str, Any]:
    serving = spec.serving
    return {
        "grpc_port": constants.GRPC_PORT,
        "admin_port": constants.ADMIN_PORT,
        "max_concurrent_requests": serving.max_concurrent_requests,
        "max_queue_length": serving.max_queue_length,
        "request_timeout_seconds": serving.request_timeout_seconds,
        "queue_timeout_seconds": serving.queue_timeout_seconds,
        "drain_timeout_seconds": spec.disruption.drain_timeout_seconds,
        "lame_duck_seconds": serving.lame_duck_seconds,
        "max_connection_age_seconds": serving.max_connection_age_seconds,
    }


def _model(model: TargetSpec | DraftSpec, path: str) -> dict[str, Any]:
    return {"path": path, "dtype": model.dtype, "tensor_parallel_size": model.tensor_parallel_size}


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
