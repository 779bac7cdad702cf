"""The resource's status: conditions with reasons, written on change; live figures, rounded and seldom.

The CRD's status schema is generated from `SpeculativeDeploymentStatus`: what is not a field there is dropped
by the API server without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from draftline_operator.models.schema import Section

ConditionStatus = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    """In the order in which they are listed."""

    READY = "Ready"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    MODELS_VERIFIED = "ModelsVerified"
    MEMORY_FITS = "MemoryFits"
    AUTOSCALING_ACTIVE = "AutoscalingActive"


@dataclass(frozen=True, slots=True)
class Condition:
    """As decided; its transition time is settled when it is merged with what the resource has."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str = ""


Bytes = Annotated[int, Field(ge=0, le=2**53)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class StoredCondition(Section):
    """A condition in the form that all of Kubernetes shares."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """What it is about; Ready sums up the others."""
    status: ConditionStatus
    """True, False or Unknown."""
    observed_generation: Annotated[int, Field(ge=0, le=2**53)]
    """The generation of the spec that it is about."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When its status changed last."""
    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Why, for programs."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, for people."""


class ModelStatus(Section):
    """A model or a draft head as preflight found it."""

    architecture: Annotated[str, Field(max_length=128)] | None = None
    """Such as LlamaForCausalLM; Eagle3DraftHead is a draft head."""
    digest: Annotated[str, Field(max_length=71)] | None = None
    """What its files hash to."""
    revision: Annotated[str, Field(max_length=128)] | None = None
    """What the spec's revision was resolved to; pods fetch this one."""


class MemoryPlanStatus(Section):
    """Bytes of one pod, on one accelerator or in the container."""

    weights_bytes: Bytes | None = None
    """Weights of both models."""
    activation_bytes: Bytes | None = None
    """Logits and activations at their peak."""
    kv_bytes_per_token: Bytes | None = None
    """KV cache of both models for one token."""
    kv_pool_bytes: Bytes | None = None
    """The KV cache that pods will have."""
    required_bytes: Bytes | None = None
    """The least that serves one request of the longest context."""
    available_bytes: Bytes | None = None
    """What there is; absent where nobody knows."""
    fits: bool | None = None
    """Whether required is within available; absent where that is not known."""


class SpeculativeDeploymentStatus(Section):
    """What was observed."""

    observed_generation: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """The generation of the spec that this status is about."""
    conditions: Annotated[
        tuple[StoredCondition, ...],
        Field(
            max_length=32,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    """Ready, Available, Progressing, Degraded, ModelsVerified, MemoryFits and AutoscalingActive, each with a
    reason."""
    replicas: Count | None = None
    """Pods that there are, without leaving ones and the surge of a rollout."""
    ready_replicas: Count | None = None
    """Pods that serve."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the pods, for /scale."""
    current_revision: Annotated[str, Field(max_length=63)] | None = None
    """The key of the pair that was rolled out last; pods carry it as the label draftline.dev/revision."""
    pair_digest: Annotated[str, Field(max_length=71)] | None = None
    """Digest of the verified pair, which each pod checks before it serves."""
    target: ModelStatus | None = None
    """The target as preflight found it."""
    draft: ModelStatus | None = None
    """The draft as preflight found it."""
    memory_plan: MemoryPlanStatus | None = None
    """How a pod's memory is shared out, as preflight computed it."""
    acceptance_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Accepted by proposed draft tokens, over all pods."""
    speculation_state: Annotated[str, Field(max_length=63)] | None = None
    """Whether pods speculate at the moment."""
    queue_depth: Count | None = None
    """Requests that wait, in all pods."""


def merge_conditions(
    existing: Iterable[dict[str, Any]], decided: Iterable[Condition], *, generation: int, now: str
) -> list[dict[str, Any]]:
    """Conditions as they are stored; `lastTransitionTime` changes only with the status."""
    before = {condition.get("type"): condition for condition in existing}
    merged = []
    for condition in decided:
        old = before.get(condition.type, {})
        has_changed = old.get("status") != condition.status
        merged.append(
            {
                "type": str(condition.type),
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "observedGeneration": generation,
                "lastTransitionTime": now if has_changed else old.get("lastTransitionTime", now),
            }
        )
    return merged
