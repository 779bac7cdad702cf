"""The key of a model pair: what one preflight result holds for."""

from __future__ import annotations

from typing import Any

from draftline_operator.models.names import short_hash
from draftline_operator.models.quantity import canonical_quantity
from draftline_operator.models.resource import RenderSettings, Resource
from draftline_operator.models.spec import DraftSpec, SpeculativeDeploymentSpec, TargetSpec
from draftline_operator.resources.server_config import inference_config


def pair_key(resource: Resource, settings: RenderSettings) -> str:
    """Equal for all resources whose preflights would find the same, whatever their names; 8 hex digits.

    Of everything that a preflight depends on: models, dtypes, parallel sizes, draft length limit, what takes
    memory, the accelerator or a container's memory limit, and the image, which has the judging code.
    """
    spec = resource.spec
    accelerator = spec.accelerator
    return short_hash(
        {
            "image": spec.image or settings.default_image,
            "accelerator": None if accelerator is None else [accelerator.resource_name, accelerator.memory],
            "nodes": _nodes(spec),
            "memory_limit": _memory_limit(spec) if accelerator is None else None,
            "target": _model(spec.target),
            "draft": _model(spec.draft) if spec.draft is not None and spec.uses_draft_model else None,
            "num_speculative_tokens": spec.speculation.num_speculative_tokens
            if spec.speculation.enabled
            else 0,
            "max_concurrent_requests": spec.serving.max_concurrent_requests,
            "inference": inference_config(spec),
        }
    )


def _model(model: TargetSpec | DraftSpec) -> list[Any]:
    source = model.model
    return [source.uri, source.revision, source.digest, model.dtype, model.tensor_parallel_size]


def _nodes(spec: SpeculativeDeploymentSpec) -> dict[str, str] | None:
    """Which nodes tell how much memory an accelerator has, where the spec does not."""
    is_told_by_nodes = spec.accelerator is not None and spec.accelerator.memory is None
    return dict(sorted(spec.pod_template.node_selector.items())) if is_told_by_nodes else None


def _memory_limit(spec: SpeculativeDeploymentSpec) -> str | None:
    """A CPU pod's memory; a spelling that is no quantity is reported where the pod is rendered."""
    limits = (spec.pod_template.resources or {}).get("limits")
    limit = limits.get("memory") if isinstance(limits, dict) else None
    try:
        return canonical_quantity(limit) if limit is not None else None
    except ValueError:
        return str(limit)
