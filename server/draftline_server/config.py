"""The configuration file: its keys, bounds and defaults. Read once, never changed after.

The models are frozen; unknown keys are refused, and so is every value that would have to be bent to fit
(true for 1, "5" for 5, 1.9 for an integer). `load_config` turns every fault into one `ConfigError` line
with the full path of the key. Nothing here is secret: a secret would be named by its file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from draftline_server import config_faults
from draftline_server.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Method = Literal["ngram", "draft_model"]

_UNITS = {
    "": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    # As Kubernetes spells them.
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def parse_bytes(value: Any) -> Any:
    """Turns ``"4GiB"`` into bytes; leaves integers alone. Raises `ValueError`."""
    if not isinstance(value, str):
        return value
    number = value.rstrip("KMGTiB")
    unit = value[len(number) :]
    try:
        return int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"must be {_BYTE_SIZE}") from None


def _parse_path(value: Any) -> Any:
    if not isinstance(value, (str, Path)) or not str(value).strip() or value == Path():
        raise ValueError("must be the path of a directory")
    return Path(value)


def _one_by_one(value: Any) -> Any:
    """A YAML list is accepted for a tuple; a text, which Python would take letter by letter, is not."""
    return tuple(value) if isinstance(value, list) else value


_BYTE_SIZE = "a number of bytes, or text such as 512MiB or 4GiB"
ByteSize = Annotated[
    int,
    Field(strict=True, json_schema_extra={"description_of_value": _BYTE_SIZE}),
    BeforeValidator(parse_bytes),
]
DirectoryPath = Annotated[
    Path,
    Field(json_schema_extra={"description_of_value": "the path of a directory"}),
    BeforeValidator(_parse_path),
]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _inconsistent(path: str, reason: str) -> PydanticCustomError:
    """A fault between two keys; `path` is the full path of the one to change first."""
    return PydanticCustomError("inconsistent", "{path}: {reason}", {"path": path, "reason": reason})


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ServerConfig(_Section):
    """Ports, queues and times."""

    host: Annotated[str, Field(pattern=r"^[!-~]+$")] = "[::]"
    """The address to listen on."""
    grpc_port: Port = 50051
    """0 takes a free port and logs it."""
    admin_port: Port = 9090
    """Metrics and probes; 0 takes a free port and logs it."""
    max_concurrent_requests: Count = 32
    """Requests that run at once."""
    max_queue_length: Annotated[int, Field(ge=0, le=2**31 - 1)] = 256
    """Requests that wait; one more is refused with RESOURCE_EXHAUSTED."""
    request_timeout_seconds: Seconds = 120.0
    """The longest a request may take, whatever its client's deadline."""
    queue_timeout_seconds: Seconds = 30.0
    """The longest a request may wait before it runs for the first time."""
    drain_timeout_seconds: Seconds = 150.0
    """After SIGTERM and the lame duck, the time that accepted requests get to finish."""
    lame_duck_seconds: Annotated[float, Field(ge=0, le=600)] = 5.0
    """After SIGTERM, the time in which new calls are still taken while health says NOT_SERVING.

    While calls still come it goes on until every connection has ended by its age; 0 ends it at once."""
    max_connection_age_seconds: Annotated[float, Field(ge=0.001, le=86_400)] = 30.0
    """Connections are ended gracefully at this age, so that clients find new replicas."""
    engine_hang_seconds: Seconds = 60.0
    """A step that takes longer makes the server unhealthy; generous, since a step has no usual length."""
    max_message_bytes: Annotated[ByteSize, Field(ge=2**10, le=2**30)] = 4 * 2**20
    """The largest request message."""
    request_id_header: Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,64}$")] = "x-request-id"
    """The metadata key that carries the request id in and out."""

    @field_validator("request_id_header")
    @classmethod
    def _header_is_ours(cls, value: str) -> str:
        if value.startswith("grpc-") or value.endswith("-bin"):
            raise ValueError("must not begin with grpc- (reserved) or end with -bin (binary values)")
        return value

    @model_validator(mode="after")
    def _drain_outlasts_requests(self) -> Self:
        if self.drain_timeout_seconds < self.request_timeout_seconds:
            raise _inconsistent(
                "server.drain_timeout_seconds",
                f"{self.drain_timeout_seconds:g} is below server.request_timeout_seconds "
                f"({self.request_timeout_seconds:g}); a drain must outlast every request",
            )
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.grpc_port == self.admin_port != 0:
            raise _inconsistent("server.admin_port", f"{self.admin_port} is server.grpc_port too")
        return self


class ModelConfig(_Section):
    """One model."""

    path: DirectoryPath
    """A directory with config.json, tokenizer and safetensors files."""
    dtype: Dtype = "auto"
    """The dtype of weights and cache; auto takes the checkpoint's."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1)] = 1
    """GPUs that share the model; only 1 for now."""


class ModelsConfig(_Section):
    """The pair."""

    target_model: ModelConfig
    draft_model: ModelConfig | None = None
    expected_pair_digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """A server whose pair has another digest does not start."""


class InferenceConfig(_Section):
    """Sizes of context, batch and cache."""

    max_context_length: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    """Prompt and output together, in tokens; default: as the target was made for."""
    context_overflow: Literal["reject", "truncate_left"] = "reject"
    """What happens to a prompt that leaves too little room for its output.

    reject: without room for one token it is refused. truncate_left: it loses its oldest tokens until there is
    room for max_tokens, but at most for half of the context; for a quarter where max_tokens is not set."""
    max_tokens_per_request: Count = 2048
    """Larger max_tokens are clamped to this."""
    max_batch_size: Count | None = None
    """Sequences in one step; default: server.max_concurrent_requests."""
    max_batched_tokens: Annotated[int, Field(ge=16, le=2**20)] = 2048
    """Tokens in one step; longer prompts are prefilled in chunks."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in one block of the KV cache."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for weights and cache."""
    kv_cache_memory: Annotated[ByteSize, Field(gt=0)] | None = None
    """Fixes the size of the cache, of both models together."""
    prefix_caching: bool = True
    """Keeps the cache of finished requests for prompts that begin alike."""


class SpeculativeDecodingConfig(_Section):
    """How drafts are made and when they are worth it."""

    enabled: bool = True
    methods: Annotated[tuple[Method, ...], BeforeValidator(_one_by_one)] = ("ngram", "draft_model")
    """By preference (adaptive: what promises more goes first); draft_model only where there is a draft."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = 5
    """The longest draft of a step; 0 is off."""
    max_batch_size: Annotated[int, Field(ge=1)] = 8
    """A step with more sequences decodes without speculation."""
    adaptive: bool = True
    """Picks each draft's length by measured acceptance and cost."""
    fallback_to_standard_decoding: bool = True
    """Switches speculation off while it does not pay."""
    min_acceptance_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Below this first-position acceptance speculation is switched off, where falling back is allowed."""
    ngram_min: Annotated[int, Field(ge=1, le=16)] = 2
    """The shortest match that the n-gram proposer continues."""
    ngram_max: Annotated[int, Field(ge=1, le=16)] = 4
    """The longest match that the n-gram proposer looks for."""

    @model_validator(mode="after")
    def _ngram_range(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise _inconsistent(
                "speculative_decoding.ngram_min",
                f"{self.ngram_min} is above speculative_decoding.ngram_max ({self.ngram_max})",
            )
        return self

    @model_validator(mode="after")
    def _methods_are_usable(self) -> Self:
        if len(set(self.methods)) != len(self.methods):
            raise _inconsistent("speculative_decoding.methods", "names a method twice")
        if self.enabled and not self.methods:
            raise _inconsistent(
                "speculative_decoding.methods",
                "is empty; to decode without speculation set speculative_decoding.enabled to false",
            )
        return self


class ObservabilityConfig(_Section):
    """Logs and metrics."""

    enable_metrics: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"


class Config(_Section):
    """The whole file."""

    service_name: Annotated[str, Field(min_length=1, max_length=253)] = "draftline"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    server: ServerConfig = ServerConfig()
    models: ModelsConfig
    inference: InferenceConfig = InferenceConfig()
    speculative_decoding: SpeculativeDecodingConfig = SpeculativeDecodingConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def max_batch_size(self) -> int:
        """Sequences in one step."""
        return self.inference.max_batch_size or self.server.max_concurrent_requests

    @property
    def max_running(self) -> int:
        """Requests that run at once: each has a place in every step."""
        return min(self.max_batch_size, self.server.max_concurrent_requests)

    @property
    def num_speculative_tokens(self) -> int:
        """The longest draft; 0 where speculation is off."""
        return self.speculative_decoding.num_speculative_tokens if self.speculative_decoding.enabled else 0

    @property
    def uses_draft_model(self) -> bool:
        """Whether the draft model is ever run, and so has to be in memory."""
        has_method = "draft_model" in self.speculative_decoding.methods
        return self.models.draft_model is not None and has_method and self.num_speculative_tokens > 0

    @model_validator(mode="after")
    def _step_fits_its_budget(self) -> Self:
        budget = self.inference.max_batched_tokens
        if self.max_batch_size > budget:
            is_default = self.inference.max_batch_size is None
            key = "server.max_concurrent_requests" if is_default else "inference.max_batch_size"
            raise _inconsistent(
                "inference.max_batched_tokens",
                f"{budget} is below {key} ({self.max_batch_size}); each sequence needs one token of a step",
            )
        if self.num_speculative_tokens + 1 > budget:
            raise _inconsistent(
                "speculative_decoding.num_speculative_tokens",
                f"{self.num_speculative_tokens} and one more token do not fit into "
                f"inference.max_batched_tokens ({budget})",
            )
        return self

    @model_validator(mode="after")
    def _draft_model_is_there(self) -> Self:
        speculation = self.speculative_decoding
        only_draft_model = speculation.enabled and speculation.methods == ("draft_model",)
        if only_draft_model and self.models.draft_model is None:
            raise _inconsistent(
                "speculative_decoding.methods",
                "names only draft_model, but models.draft_model is not set",
            )
        return self


def parse_config(document: object) -> Config:
    """Validates a parsed YAML document; raises `ConfigError` with the path of the first fault."""
    if document is None:
        raise ConfigError("(the file): is empty; at least models.target_model.path must be set")
    if not isinstance(document, dict):
        raise ConfigError(
            f"(the file): must be a mapping of keys, not {config_faults.describe_value(document)}"
        )
    try:
        return Config.model_validate(document)
    except pydantic.ValidationError as error:
        raise ConfigError(config_faults.explain(error, Config)) from error


def with_overrides(document: object, overrides: Mapping[str, object]) -> object:
    """A copy of a parsed document with keys set by their full paths; what is no mapping stays as it is."""
    if not isinstance(document, dict):
        return document
    result: dict[object, object] = copy.deepcopy(document)
    for path, value in overrides.items():
        *sections, name = path.split(".")
        section: object = result
        for key in sections:
            section = section.setdefault(key, {}) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section[name] = value
    return result


def load_config(path: Path, overrides: Mapping[str, object] | None = None) -> Config:
    """Reads and validates a configuration file; a `ConfigError` begins with the file's path.

    `overrides` are values that go before those of the file, by full path of their keys.
    """
    try:
        document = config_faults.parse_yaml(path.read_text(encoding="utf-8"))
        return parse_config(with_overrides(document, overrides or {}))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except config_faults.DuplicateKeyError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
