"""Which models the engine can run, and what the rest of the server needs to know of one.

Our attention function replaces the model's own, so a model is served only if it is known to compute
nothing but what that function computes: causal attention over a paged cache, grouped heads, sliding
windows (masked over the full cache), soft-capping. Everything else is refused with a reason, because a
model that merely runs could answer wrongly without any sign of it. Nothing here loads a weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from draftline_server.errors import ModelError

# model_type → the class that computes it.
_SUPPORTED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

_RECURRENT = "it has recurrent (state-space or linear attention) layers, whose state cannot be rolled back"
_EXPERTS = "mixtures of experts are not supported"
_ALIBI = "ALiBi position biases are not supported"
_REASONS = {
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "rwkv": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "jamba": _RECURRENT,
    "bamba": _RECURRENT,
    "zamba": _RECURRENT,
    "zamba2": _RECURRENT,
    "nemotron_h": _RECURRENT,
    "granitemoehybrid": _RECURRENT,
    "falcon_h1": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "lfm2": _RECURRENT,
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "gpt_oss": "attention sinks are not supported",
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "falcon": _ALIBI,
    "gemma3": "it reads images, too; only the text model (model_type gemma3_text) is supported",
}

# These change with the longest sequence of a batch, so that requests would change each other's output.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# What contradicts itself is found when the skeleton is built; these make a skeleton that cannot be served.
_LEAST = {"num_hidden_layers": 1, "max_position_embeddings": 2}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What one model is, as far as sizes and limits go. Dtypes have torch's names."""

    model_type: str
    architecture: str
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding; padding may make it larger than the tokenizer's vocabulary."""
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    """Per layer; None is full attention."""
    has_capped_scores: bool = False
    """Whether attention caps its scores softly, which takes memory of its own."""
    num_parameters: int
    """Tied weights count once."""
    has_tied_head: bool
    """Whether the output layer shares the embedding's weight."""
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that one token takes in this model's cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The tensors that a model of some config has, without their values."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    """Tensors that share another one's memory, and so may be left out of a checkpoint."""
    base_prefix: str
    """What a checkpoint of the headless model leaves out of its names."""
    num_parameters: int


def read_config(directory: Path) -> PreTrainedConfig:
    """Reads config.json and refuses what the engine cannot run. Raises `ModelError`."""
    path = directory / "config.json"
    document = read_json_object(path)
    _check_document(path, document)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a wrong value makes transformers raise
        raise ModelError(f"{path}: {first_cause(error)}") from error
    _check_config(path, config)
    return config


def read_eos_token_ids(directory: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Every end-of-sequence id: generation_config.json's where it names some, else config.json's."""
    path = directory / "generation_config.json"
    stated = read_json_object(path).get("eos_token_id") if path.exists() else None
    if stated is None:
        path, stated = directory / "config.json", config.eos_token_id
    if stated is None:
        return ()
    ids = tuple(stated) if isinstance(stated, (list, tuple)) else (stated,)
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < config.vocab_size:
            raise ModelError(f"{path}: eos_token_id {token_id} is not in [0, {config.vocab_size})")
    return tuple(dict.fromkeys(ids))


def build_skeleton(directory: Path, config: PreTrainedConfig) -> Skeleton:
    """Builds the model on the meta device, which allocates nothing."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # a config that contradicts itself fails somewhere inside the model
        raise ModelError(f"{directory / 'config.json'}: {first_cause(error)}") from error
    return Skeleton(
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        tied=dict(model.all_tied_weights_keys),
        base_prefix=model.base_model_prefix,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def describe(
    config: PreTrainedConfig, skeleton: Skeleton, *, checkpoint_dtype: str, eos_token_ids: tuple[int, ...]
) -> ModelFacts:
    """Gathers the facts of a config that `read_config` let through."""
    heads = config.num_attention_heads
    hidden_size = config.hidden_size
    return ModelFacts(
        model_type=config.model_type,
        architecture=_SUPPORTED[config.model_type],
        num_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden_size // heads,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        sliding_windows=_sliding_windows(config),
        has_capped_scores=getattr(config, "attn_logit_softcapping", None) is not None,
        num_parameters=skeleton.num_parameters,
        has_tied_head=bool(skeleton.tied),
        checkpoint_dtype=checkpoint_dtype,
        eos_token_ids=eos_token_ids,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; raises `ModelError` naming the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: missing") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of UTF-8 and of JSON
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: not a JSON object")
    return document


def _check_document(path: Path, document: Mapping[str, Any]) -> None:
    model_type = document.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{path}: model_type is missing")
    if document.get("is_encoder_decoder"):
        raise ModelError(f"{path}: {model_type} has an encoder; only decoder-only models are supported")
    if document.get("quantization_config"):
        raise ModelError(f"{path}: its weights are quantized (quantization_config), which is not supported")
    if document.get("transformers_weights"):
        raise ModelError(
            f"{path}: transformers_weights is not supported; weights are in model.safetensors, or where its "
            "index says"
        )
    if model_type not in _SUPPORTED:
        known = ", ".join(_SUPPORTED)
        reason = _REASONS.get(model_type, f"the engine does not know it (it knows {known})")
        raise ModelError(f"{path}: model_type {model_type} cannot be served: {reason}")
    architectures = document.get("architectures") or [_SUPPORTED[model_type]]
    if architectures != [_SUPPORTED[model_type]]:
        raise ModelError(
            f"{path}: architectures is {architectures}, a served {model_type} is {_SUPPORTED[model_type]}"
        )


def _check_config(path: Path, config: PreTrainedConfig) -> None:
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ModelError(f"{path}: layer_types has {', '.join(sorted(unknown))}, which is not supported")
    for key in ("add_cross_attention", "use_bidirectional_attention", "reorder_and_upcast_attn"):
        if getattr(config, key, None):
            raise ModelError(f"{path}: {key} is not supported")
    check_least(path, config)
    for rope_type in sorted(rope_types(config) & BATCH_DEPENDENT_ROPE):
        raise ModelError(
            f"{path}: rope_type {rope_type} is not supported: it changes with the longest sequence of a batch"
        )


def check_least(path: Path, config: PreTrainedConfig) -> None:
    """Raises `ModelError` for sizes with which there is no model."""
    for key, least in _LEAST.items():
        if getattr(config, key) < least:
            raise ModelError(f"{path}: {key} is {getattr(config, key)}, at least {least} is needed")


def rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary positions that a config asks for."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
    return {str(rope.get("rope_type", "default")) for rope in per_layer_type or [parameters]}


def _intermediate_size(config: PreTrainedConfig) -> int:
    size = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return int(size or 4 * config.hidden_size)


def _sliding_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:  # one rule for all layers, as Mistral has it
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def first_cause(error: BaseException) -> str:
    """The innermost message on one line: the outer ones only repeat which file was read."""
    while error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"there is no {reason}" if isinstance(error, KeyError) else reason
