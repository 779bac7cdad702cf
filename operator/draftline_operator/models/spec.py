"""The resource's spec: fields, bounds, defaults and descriptions. The CRD's schema is generated from it.

`parse_spec` is what the reconcile starts with. The API server has validated the same already, by the schema
and its CEL rules; here it is done again for resources that were stored under an older schema. A condition
over several fields is a `Rule`: its CEL goes into the schema, its twin in Python is the validator next to it.
It is long because it is one text, in the order in which a resource is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, model_validator

from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.schema import (
    Annotations,
    KubernetesObject,
    Labels,
    Name,
    Quantity,
    Rule,
    Section,
    has_text,
    known_field,
    list_by,
    with_rules,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Method = Literal["NGram", "DraftModel"]

# ----------------------------------------------------------------------------------------------- the sections


class SecretReference(Section):
    """A Secret in the resource's namespace."""

    name: Name
    """Name of the Secret."""


class AcceleratorSpec(Section):
    """The GPUs that a pod gets: as many as tensor parallelism needs."""

    resource_name: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=253)] = (
        "nvidia.com/gpu"
    )
    """The extended resource to request."""
    memory: Quantity | None = None
    """Memory of one accelerator. Left out: taken from the nodes' nvidia.com/gpu.memory label, else not
    checked before scheduling."""
    count: Annotated[int, Field(ge=1, le=16)] | None = None
    """Accelerators of a pod. Must equal the target's tensorParallelSize, which it is when left out."""


class EmptyDirSpec(Section):
    """A volume that lives as long as its pod."""

    size_limit: Quantity | None = None
    """The most that may be stored; default: what the node has."""


_ONE_CACHE = Rule(
    "",
    "set only one of persistentVolumeClaim and emptyDir",
    "!(has(self.persistentVolumeClaim) && has(self.emptyDir))",
)


class ModelCacheSpec(Section):
    """Where fetched models live: a claim, or an emptyDir, which it is when both are left out."""

    model_config = with_rules(_ONE_CACHE)

    persistent_volume_claim: Name | None = None
    """A claim in the resource's namespace, which all pods mount (ReadWriteMany where they span nodes)."""
    empty_dir: EmptyDirSpec | None = None
    """Each pod fetches for itself. The default."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if self.persistent_volume_claim is not None and self.empty_dir is not None:
            raise _ONE_CACHE.fault()
        return self


_CLAIM = r"pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?"
_URI = rf"^({_CLAIM}|file:///.+|hf://[A-Za-z0-9._-]+/[A-Za-z0-9._-]+|s3://[a-z0-9][a-z0-9.-]+/.+)$"
_PARENT = r"/[.][.](/|$)"
_URI_FORM = Rule(
    "uri",
    "must be pvc://CLAIM/PATH, file:///PATH, hf://ORG/NAME or s3://BUCKET/PREFIX, without ..",
    f"self.uri.matches('{_URI}') && !self.uri.matches('{_PARENT}')",
)
_CREDENTIALS_ARE_USED = Rule(
    "credentialsSecretRef",
    "is only for models that are fetched: hf:// and s3://",
    "!has(self.credentialsSecretRef) || self.uri.startsWith('hf://') || self.uri.startsWith('s3://')",
)


class ModelSource(Section):
    """Where a model's files come from."""

    model_config = with_rules(_URI_FORM, _CREDENTIALS_ARE_USED)

    uri: Annotated[str, Field(min_length=1, max_length=1024)]
    """pvc://CLAIM/PATH, file:///PATH (on the node, where the chart allows it), hf://ORG/NAME or
    s3://BUCKET/PREFIX."""
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=128)] | None = None
    """Of hf://: a branch, tag or commit. Of others: a name for the state of the files; a change rolls out
    anew."""
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$", max_length=71)] | None = None
    """What the files must hash to."""
    credentials_secret_ref: SecretReference | None = None
    """Its keys become environment variables of the step that fetches: HF_TOKEN, AWS_ACCESS_KEY_ID and so on.
    Endpoints are no secrets; they go into podTemplate.env, where the network policy sees them."""

    @property
    def scheme(self) -> str:
        return self.uri.partition("://")[0]

    @property
    def is_fetched(self) -> bool:
        """Whether the files are brought into the model cache, instead of read where they are."""
        return self.scheme in ("hf", "s3")

    @model_validator(mode="after")
    def _is_well_formed(self) -> Self:
        if re.fullmatch(_URI, self.uri) is None or re.search(_PARENT, self.uri) is not None:
            raise _URI_FORM.fault()
        if self.credentials_secret_ref is not None and not self.is_fetched:
            raise _CREDENTIALS_ARE_USED.fault()
        return self


class TargetSpec(Section):
    """The model whose output is served."""

    model: ModelSource
    """Where its files come from."""
    dtype: Dtype = "auto"
    """The dtype of weights and cache; auto takes the checkpoint's."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1)] = 1
    """GPUs that share the model; only 1 for now."""


class DraftSpec(Section):
    """The model, or draft head, that proposes tokens; which of both is told by its config.json."""

    model: ModelSource
    """Where its files come from."""
    dtype: Dtype = "auto"
    """The dtype of weights and cache; auto takes the checkpoint's."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1)] = 1
    """GPUs that share the model; only 1 for now."""
    placement: Literal["Shared"] = "Shared"
    """On the target's own GPUs; the only placement for now."""


_METHODS_DIFFER = Rule(
    "methods", "names a method twice", "self.methods.all(m, self.methods.exists_one(n, n == m))"
)


class SpeculationSpec(Section):
    """How drafts are made and when they are worth it."""

    model_config = with_rules(_METHODS_DIFFER)

    enabled: bool = True
    """Whether to speculate at all; output is the same either way."""
    methods: Annotated[tuple[Method, ...], Field(min_length=1, max_length=2)] = ("NGram", "DraftModel")
    """By preference (adaptive: what promises more goes first); DraftModel only where there is a draft."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = 5
    """The longest draft; 0 is off."""
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """A step with more sequences decodes without speculation."""
    adaptive: bool = True
    """Picks each draft's length by measured acceptance and cost."""
    fallback_to_standard_decoding: bool = True
    """Switches speculation off while it does not pay."""
    min_acceptance_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Below this first-position acceptance speculation is switched off, where falling back is allowed."""

    @model_validator(mode="after")
    def _methods_differ(self) -> Self:
        if len(set(self.methods)) != len(self.methods):
            raise _METHODS_DIFFER.fault()
        return self


_SEATS_FIT = Rule(
    "maxBatchedTokens",
    "must not be below maxConcurrentRequests: each running request needs one token of a step",
    "self.maxBatchedTokens >= self.maxConcurrentRequests",
)


class ServingSpec(Section):
    """Sizes, queues and times of a pod."""

    model_config = with_rules(_SEATS_FIT)

    max_concurrent_requests: Annotated[int, Field(ge=1, le=4096)] = 32
    """Requests that a pod runs at once."""
    max_queue_length: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    """Requests that wait in a pod."""
    max_context_length: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    """Prompt and output together, in tokens; default: as the target was made for."""
    context_overflow: Literal["Reject", "TruncateLeft"] = "Reject"
    """Whether a prompt without room for its output is refused or cut."""
    max_tokens_per_request: Annotated[int, Field(ge=1, le=16_777_216)] = 2048
    """Larger max_tokens are clamped to this."""
    max_batched_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 2048
    """Tokens in one step; longer prompts are prefilled in chunks."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for weights and cache."""
    kv_cache_memory: Quantity | None = None
    """Fixes the size of the KV cache, of both models together."""
    request_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 120
    """The longest a request may take."""
    queue_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 30
    """The longest a request may wait before it runs."""
    lame_duck_seconds: Annotated[int, Field(ge=0, le=600)] = 5
    """After SIGTERM, the time in which calls are still taken."""
    max_connection_age_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Connections are ended gracefully at this age, so that clients find new pods."""
    startup_timeout_seconds: Annotated[int, Field(ge=30, le=86_400)] = 1800
    """The time that a pod gets to load its models, fetching not included."""

    @model_validator(mode="after")
    def _seats_fit(self) -> Self:
        if self.max_batched_tokens < self.max_concurrent_requests:
            raise _SEATS_FIT.fault()
        return self


_WATERMARKS = Rule("lowWatermark", "must be below highWatermark", "self.lowWatermark < self.highWatermark")


class QueueDepthSpec(Section):
    """Waiting requests of a pod that the autoscaler aims at."""

    model_config = with_rules(_WATERMARKS)

    high_watermark: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    """More waiting requests per pod than this add pods."""
    low_watermark: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    """Load above this share of the high watermark holds the pods that there are, load below it removes some
    (Kubernetes 1.35 and later)."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.low_watermark >= self.high_watermark:
            raise _WATERMARKS.fault()
        return self


_REPLICA_BOUNDS = Rule("minReplicas", "must not exceed maxReplicas", "self.minReplicas <= self.maxReplicas")


class AutoscalingSpec(Section):
    """Replicas follow the load."""

    model_config = with_rules(_REPLICA_BOUNDS)

    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """The fewest pods."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """The most pods."""
    queue_depth: QueueDepthSpec = QueueDepthSpec()
    """Waiting requests of a pod that the autoscaler aims at."""
    behavior: KubernetesObject | None = None
    """autoscaling/v2 HorizontalPodAutoscalerBehavior; default: up at once, down by a pod a minute after five
    minutes."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise _REPLICA_BOUNDS.fault()
        return self


class DisruptionSpec(Section):
    """What pods that leave are given."""

    max_unavailable: Annotated[int, Field(ge=1, le=1000)] = 1
    """Pods that evictions may take away at once."""
    drain_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 150
    """The time that accepted requests get to finish; not below serving.requestTimeoutSeconds."""


Volume = Annotated[KubernetesObject, known_field("name", "Name of the volume.", 63), has_text("name")]
VolumeMount = Annotated[
    KubernetesObject, known_field("mountPath", "Path within the container.", 1024), has_text("mountPath")
]
EnvVar = Annotated[KubernetesObject, known_field("name", "Name of the variable.", 253), has_text("name")]


class PodTemplateSpec(Section):
    """What is added to the serving pods, and to the preflight pod."""

    labels: Labels = Field(default={})
    """Added to pods; the operator's own keys are refused."""
    annotations: Annotations = Field(default={})
    """Added to pods; the operator's own keys are refused."""
    node_selector: Labels = Field(default={})
    """Labels that nodes must have."""
    tolerations: Annotated[tuple[KubernetesObject, ...], Field(max_length=64)] = ()
    """core/v1 Tolerations, beside the one for the accelerator's taint."""
    affinity: KubernetesObject | None = None
    """core/v1 Affinity, ANDed with the operator's own."""
    topology_spread_constraints: Annotated[tuple[KubernetesObject, ...], Field(max_length=16)] = ()
    """core/v1 TopologySpreadConstraints; they replace the operator's own, which spread softly over hosts and
    zones."""
    priority_class_name: Name | None = None
    """The pods' PriorityClass."""
    runtime_class_name: Name | None = None
    """The pods' RuntimeClass, such as nvidia where that is not the default."""
    scheduler_name: Name | None = None
    """The scheduler that places the pods."""
    image_pull_secrets: Annotated[tuple[SecretReference, ...], list_by("name", 16)] = ()
    """Secrets to pull the image with."""
    volumes: Annotated[tuple[Volume, ...], list_by("name")] = ()
    """core/v1 Volumes; the operator's own names are refused, and hostPath where the chart does not allow
    it."""
    volume_mounts: Annotated[tuple[VolumeMount, ...], list_by("mountPath")] = ()
    """core/v1 VolumeMounts of these volumes, in every container; the operator's own paths are refused."""
    env: Annotated[tuple[EnvVar, ...], list_by("name", 256)] = ()
    """core/v1 EnvVars of every container; the operator's own names are refused."""
    resources: KubernetesObject | None = None
    """core/v1 ResourceRequirements: requests and limits of CPU and memory; accelerators come from
    spec.accelerator."""


_ACCELERATORS = Rule(
    "accelerator.count",
    "must equal target.tensorParallelSize",
    "!has(self.accelerator) || !has(self.accelerator.count)"
    " || self.accelerator.count == self.target.tensorParallelSize",
)
_DRAIN = Rule(
    "disruption.drainTimeoutSeconds",
    "must not be below serving.requestTimeoutSeconds: a drain must outlast every request",
    "self.disruption.drainTimeoutSeconds >= self.serving.requestTimeoutSeconds",
)
_SOMETHING_DRAFTS = Rule(
    "speculation.methods",
    "names only DraftModel, but there is no draft; add draft or NGram, or set speculation.enabled to false",
    "!self.speculation.enabled || has(self.draft) || self.speculation.methods.exists(m, m == 'NGram')",
)
_DRAFTS_FIT = Rule(
    "speculation.numSpeculativeTokens",
    "must be below serving.maxBatchedTokens",
    "!self.speculation.enabled || self.speculation.numSpeculativeTokens < self.serving.maxBatchedTokens",
)


class SpeculativeDeploymentSpec(Section):
    """What a user asks for."""

    model_config = with_rules(_ACCELERATORS, _DRAIN, _SOMETHING_DRAFTS, _DRAFTS_FIT)

    image: (
        Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
        | None
    ) = None
    """The serving image; default: the operator's."""
    accelerator: AcceleratorSpec | None = None
    """The GPUs that a pod gets. Left out: pods run on CPUs."""
    model_cache: ModelCacheSpec = ModelCacheSpec()
    """Where fetched models live: a claim, or an emptyDir, which it is when both are left out."""
    target: TargetSpec
    """The model whose output is served."""
    draft: DraftSpec | None = None
    """The model or draft head that proposes tokens. Without one they are looked up in the text (NGram)."""
    speculation: SpeculationSpec = SpeculationSpec()
    """How drafts are made and when they are worth it."""
    serving: ServingSpec = ServingSpec()
    """Sizes, queues and times of a pod."""
    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Pods; default: 1. Leave it out of manifests where autoscaling is set, which writes it through
    /scale."""
    autoscaling: AutoscalingSpec | None = None
    """Replicas follow the load. Left out: they stay as they are set."""
    disruption: DisruptionSpec = DisruptionSpec()
    """What pods that leave are given."""
    pod_template: PodTemplateSpec = PodTemplateSpec()
    """What is added to the serving pods, and to the preflight pod."""

    @property
    def uses_draft_model(self) -> bool:
        """Whether the draft is ever run."""
        speculation = self.speculation
        is_on = speculation.enabled and speculation.num_speculative_tokens > 0
        return is_on and self.draft is not None and "DraftModel" in speculation.methods

    @property
    def models(self) -> dict[str, ModelSource]:
        """What pods need on disk, by role: the target, and a draft that is run."""
        draft = {"draft": self.draft.model} if self.draft is not None and self.uses_draft_model else {}
        return {"target": self.target.model, **draft}

    @property
    def fetches_models(self) -> bool:
        """Whether anything is brought into the model cache."""
        return any(model.is_fetched for model in self.models.values())

    @property
    def accelerator_count(self) -> int:
        """Accelerators of a pod; 0 on CPUs."""
        return self.target.tensor_parallel_size if self.accelerator is not None else 0

    @model_validator(mode="after")
    def _accelerators_fit_parallelism(self) -> Self:
        count = self.accelerator.count if self.accelerator is not None else None
        if count is not None and count != self.target.tensor_parallel_size:
            raise _ACCELERATORS.fault()
        return self

    @model_validator(mode="after")
    def _drain_outlasts_requests(self) -> Self:
        if self.disruption.drain_timeout_seconds < self.serving.request_timeout_seconds:
            raise _DRAIN.fault()
        return self

    @model_validator(mode="after")
    def _drafts_are_possible(self) -> Self:
        speculation = self.speculation
        if speculation.enabled and self.draft is None and "NGram" not in speculation.methods:
            raise _SOMETHING_DRAFTS.fault()
        if speculation.enabled and speculation.num_speculative_tokens >= self.serving.max_batched_tokens:
            raise _DRAFTS_FIT.fault()
        return self


# ---------------------------------------------------------------------------------------------------- parsing


def parse_spec(document: Mapping[str, Any]) -> SpeculativeDeploymentSpec:
    """Validates a resource's ``spec``; raises `InvalidSpecError` with the path of the first fault.

    As strict as the API server: "5" is no number, and 1 is not true.
    """
    try:
        return SpeculativeDeploymentSpec.model_validate_json(json.dumps(dict(document)), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first.get("ctx", {}).get("field", "")) if first["type"] == "inconsistent" else ""
        path = "spec" + "".join(_step(part) for part in (*first["loc"], *field.split(".")) if part != "")
        raise InvalidSpecError(path, str(first["msg"]).removeprefix("Value error, ")) from error


def _step(part: int | str) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{part}"
