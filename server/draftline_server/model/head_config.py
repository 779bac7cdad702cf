"""Reads the config.json of a draft head: an EAGLE-3 layer that drafts from the target's hidden states.

Two published layouts are known: that of the `speculators` library (``speculators_model_type: eagle3``) and
the older one of the EAGLE authors (a Llama config with ``draft_vocab_size``), which says less: there the
layers default to an early, a middle and a late one, and no norm is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from draftline_server.errors import ModelError, PairMismatchError
from draftline_server.model.architecture import (
    BATCH_DEPENDENT_ROPE,
    ModelFacts,
    check_least,
    read_json_object,
    rope_types,
)

_LAYER_CONFIGS: Mapping[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head as its checkpoint describes it."""

    layer: PreTrainedConfig
    """Of its decoder layers; Llama's or Qwen3's."""
    layer_ids: tuple[int, ...]
    """Which of the target's hidden states it reads; see `hidden_states`."""
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    """The first layer's residual is the normed hidden state, not the raw one."""
    norm_before_fc: bool = False
    """One RMS norm over all hidden states side by side, before they are fused."""
    fc_norm: bool = False
    """An RMS norm for each of them."""
    norm_output: bool = False
    """What is fed back while drafting is normed."""

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        size: int = self.layer.vocab_size
        return size

    @property
    def captured_size(self) -> int:
        """Numbers that the target gives for each token."""
        return len(self.layer_ids) * self.target_hidden_size


def is_draft_head(directory: Path) -> bool:
    """Whether a directory holds a head and no full model. Raises `ModelError` where nothing can tell."""
    document = read_json_object(directory / "config.json")
    architectures = document.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return (
        "speculators_model_type" in document
        or "draft_vocab_size" in document
        or any("eagle" in str(name).lower() for name in names)
    )


def read_head_config(directory: Path, target: ModelFacts) -> HeadConfig:
    """Reads and checks a head that is to draft for `target`.

    Raises `ModelError` for one that nobody could run, `PairMismatchError` for one of another target.
    """
    path = directory / "config.json"
    document = read_json_object(path)
    if "speculators_model_type" in document:
        config = _read_speculators(path, document, target)
    else:
        config = _read_older(path, document, target)
    _check(path, config, target)
    return config


def _read_speculators(path: Path, document: Mapping[str, Any], target: ModelFacts) -> HeadConfig:
    kind = document["speculators_model_type"]
    if kind != "eagle3":
        raise ModelError(f"{path}: speculators_model_type {kind} is not supported, only eagle3 is")
    layer = document.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ModelError(f"{path}: transformer_layer_config is missing")
    _check_verifier(path, document, target)
    return HeadConfig(
        layer=_layer_config(path, {"model_type": "qwen3", **layer}, prefix="transformer_layer_config."),
        layer_ids=_layer_ids(path, document.get("eagle_aux_hidden_state_layer_ids"), target),
        target_hidden_size=_integer(path, document, "target_hidden_size", layer.get("hidden_size")),
        draft_vocab_size=_integer(path, document, "draft_vocab_size", None),
        **{flag: bool(document.get(flag, False)) for flag in _FLAGS},
    )


def _read_older(path: Path, document: Mapping[str, Any], target: ModelFacts) -> HeadConfig:
    nested = document.get("eagle_config")
    eagle = {**document, **(nested if isinstance(nested, dict) else {})}
    layer = {
        **document,
        "num_hidden_layers": document.get("num_hidden_layers", 1),
        "vocab_size": document.get("target_vocab_size") or document.get("vocab_size") or target.vocab_size,
    }
    return HeadConfig(
        layer=_layer_config(path, layer),
        layer_ids=_layer_ids(path, eagle.get("eagle_aux_hidden_state_layer_ids"), target),
        target_hidden_size=_integer(path, document, "target_hidden_size", layer.get("hidden_size")),
        draft_vocab_size=_integer(path, document, "draft_vocab_size", layer["vocab_size"]),
        **{flag: bool(eagle.get(flag, False)) for flag in _FLAGS},
    )


def _layer_config(path: Path, layer: Mapping[str, Any], *, prefix: str = "") -> PreTrainedConfig:
    model_type = layer.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in _LAYER_CONFIGS:
        known = ", ".join(_LAYER_CONFIGS)
        raise ModelError(f"{path}: {prefix}model_type {model_type} is not supported in a draft head: {known}")
    fields = {key: value for key, value in layer.items() if key not in ("model_type", "architectures")}
    try:
        return _LAYER_CONFIGS[model_type](**fields)
    except Exception as error:  # whatever a wrong value makes transformers raise
        raise ModelError(f"{path}: {prefix or 'the config'}: {' '.join(str(error).split())}") from error


def _layer_ids(path: Path, stated: Any, target: ModelFacts) -> tuple[int, ...]:
    if stated is None:
        return 2, target.num_layers // 2, target.num_layers - 3
    if not isinstance(stated, list) or not stated or any(type(layer_id) is not int for layer_id in stated):
        raise ModelError(f"{path}: eagle_aux_hidden_state_layer_ids is {stated}, not a list of layers")
    return tuple(stated)


def _integer(path: Path, document: Mapping[str, Any], key: str, default: Any) -> int:
    value = document.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ModelError(f"{path}: {key} is {value}, not a number above 0")
    return value


def _check_verifier(path: Path, document: Mapping[str, Any], target: ModelFacts) -> None:
    """The checkpoint names the architecture of the model that it was trained with."""
    speculators = document.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    architectures = verifier.get("architectures") if isinstance(verifier, dict) else None
    if architectures and target.architecture not in architectures:
        raise PairMismatchError(
            f"{path}: the head was made for a {', '.join(map(str, architectures))} (speculators_config."
            f"verifier.architectures), the target is a {target.architecture}"
        )


def _check(path: Path, config: HeadConfig, target: ModelFacts) -> None:
    if config.norm_before_fc and config.fc_norm:
        raise ModelError(f"{path}: norm_before_fc and fc_norm exclude each other")
    check_least(path, config.layer)
    for rope_type in sorted(rope_types(config.layer) & BATCH_DEPENDENT_ROPE):
        raise ModelError(f"{path}: rope_type {rope_type} is not supported")
    if config.layer.model_type == "llama" and "sliding_attention" in (
        getattr(config.layer, "layer_types", None) or ()
    ):
        raise ModelError(f"{path}: sliding windows are not supported in llama layers of a draft head")
    if config.target_hidden_size != target.hidden_size:
        raise PairMismatchError(
            f"{path}: the head reads hidden states of {config.target_hidden_size} numbers, the target's have "
            f"{target.hidden_size} (hidden_size)"
        )
    if config.vocab_size != target.vocab_size:
        raise PairMismatchError(
            f"{path}: the head knows a vocabulary of {config.vocab_size} tokens, the target's has "
            f"{target.vocab_size} (vocab_size)"
        )
    if config.draft_vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: draft_vocab_size {config.draft_vocab_size} is above vocab_size {config.vocab_size}"
        )
    ids = config.layer_ids
    if list(ids) != sorted(set(ids)) or min(ids) < 0 or max(ids) > target.num_layers:
        raise PairMismatchError(
            f"{path}: eagle_aux_hidden_state_layer_ids {list(ids)} are not layers in rising order of a "
            f"target that has {target.num_layers}"
        )
