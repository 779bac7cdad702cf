"""Checks the weights of a draft head, and loads them.

A head may leave out its embeddings and its output layer: both are then the target's, the output layer cut
down to the rows of the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftline_server.errors import ModelError, PairMismatchError
from draftline_server.model import attention
from draftline_server.model.architecture import ModelFacts, first_cause
from draftline_server.model.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    check_entry,
    read_checkpoint,
)
from draftline_server.model.cpu_decoder_layer import fuse_head_layers
from draftline_server.model.cpu_layers import cast_parameters, compute_dtype, replace_layers
from draftline_server.model.draft_head import DraftHead
from draftline_server.model.head_config import HeadConfig

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
# The target's own weights, which trainers keep beside the head's.
_VERIFIER_PREFIX = "verifier_"
_OLDER_PREFIX, _PREFIX = "midlayer.", "layers.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint:
    """Weights of a head whose names and shapes are right."""

    weights: Checkpoint
    has_embedding: bool
    has_output: bool
    num_parameters: int
    """Of the head as it runs: with an output layer, without an embedding that is the target's."""
    draft_token_ids: Tensor | None
    """The target's ids of the draft vocabulary, ``[draft vocabulary]``; None where both are the same."""
    ignored_tensors: tuple[str, ...]
    """Names that neither a head has nor, as those of its verifier, the target."""


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head in memory."""

    head: DraftHead
    draft_token_ids: Tensor | None
    """As in `HeadCheckpoint`."""
    dtype: torch.dtype
    """Of activations and cache."""


def read_head_checkpoint(directory: Path, config: HeadConfig) -> HeadCheckpoint:
    """Reads headers and vocabulary maps. Raises `ModelError` and `PairMismatchError`."""
    weights = read_checkpoint(directory)
    where = weights.files[0] if len(weights.files) == 1 else directory / INDEX_NAME
    found = {own_name(name): entry for name, entry in weights.tensors.items()}
    try:
        with torch.device("meta"):
            head = DraftHead(config, embedding=None, attention=attention.IMPLEMENTATION)
    except Exception as error:  # a config that contradicts itself fails somewhere inside the layers
        raise ModelError(f"{directory / 'config.json'}: {first_cause(error)}") from error
    own = head.state_dict()
    has_own_size = config.layer.hidden_size != config.target_hidden_size
    optional = set() if has_own_size else {EMBEDDING, OUTPUT}
    for name, tensor in own.items():
        entry = found.get(name)
        if entry is not None:
            check_entry(where, name, entry, tuple(tensor.shape))
        elif name not in optional:
            raise ModelError(f"{where}: lacks tensor {name} of the draft head")
    is_without = {name for name in optional if name not in found}
    known = {*own, DRAFT_TO_TARGET, TARGET_TO_DRAFT}
    return HeadCheckpoint(
        weights=weights,
        has_embedding=EMBEDDING not in is_without,
        has_output=OUTPUT not in is_without,
        num_parameters=sum(
            t.numel() for name, t in own.items() if name != EMBEDDING or name not in is_without
        ),
        draft_token_ids=_read_vocabulary(where, weights, config),
        ignored_tensors=tuple(
            sorted(
                name
                for name in weights.tensors
                if own_name(name) not in known and not name.startswith(_VERIFIER_PREFIX)
            )
        ),
    )


def describe_head(config: HeadConfig, checkpoint: HeadCheckpoint) -> ModelFacts:
    """The head's sizes and limits."""
    layer = config.layer
    return ModelFacts(
        model_type="eagle3",
        architecture="Eagle3DraftHead",
        num_layers=layer.num_hidden_layers,
        num_attention_heads=layer.num_attention_heads,
        num_kv_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=layer.max_position_embeddings,
        sliding_windows=(None,) * layer.num_hidden_layers,
        num_parameters=checkpoint.num_parameters,
        has_tied_head=False,
        checkpoint_dtype=checkpoint.weights.dtype,
        eos_token_ids=(),
    )


def load_head(
    checkpoint: HeadCheckpoint,
    config: HeadConfig,
    *,
    target: PreTrainedModel,
    target_weights: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    pack: bool = True,
) -> LoadedHead:
    """Loads a checked head beside its loaded target; as `load_model` does, on a CPU repacked on request."""
    attention.register()
    embedding = None if checkpoint.has_embedding else cast(Any, target).get_input_embeddings().weight.detach()
    head = DraftHead(config, embedding=embedding, attention=attention.IMPLEMENTATION)
    tensors = {own_name(name): tensor for name, tensor in _read_all(checkpoint.weights)}
    if not checkpoint.has_output:
        tensors[OUTPUT] = read_output_rows(target_weights, checkpoint.draft_token_ids)
    own = head.state_dict()
    head.load_state_dict({name: tensors[name] for name in own})
    module: nn.Module = head
    module.to(device).eval().requires_grad_(False)
    cast_parameters(head, dtype)
    if device.type == "cpu" and pack:
        replace_layers(head)  # before the dtype changes: packed weights keep theirs
    cast_parameters(head, compute_dtype(dtype, device))
    if device.type == "cpu" and pack:
        fuse_head_layers(head)
    return LoadedHead(head, checkpoint.draft_token_ids, compute_dtype(dtype, device))


def own_name(name: str) -> str:
    """A tensor's name in our module; the older layout calls its one layer otherwise."""
    return _PREFIX + name.removeprefix(_OLDER_PREFIX) if name.startswith(_OLDER_PREFIX) else name


def read_output_rows(target_weights: Checkpoint, token_ids: Tensor | None) -> Tensor:
    """Rows of a target's output layer ``[tokens, hidden size]``, which may be its embedding, too."""
    names = list(target_weights.tensors)
    tied = [name for name in names if name.endswith(("embed_tokens.weight", "wte.weight"))]
    candidates = [name for name in names if name.endswith(OUTPUT)] or tied
    if not candidates:
        raise ModelError(f"{target_weights.files[0]}: has no output layer that a draft head could share")
    (name, *_) = candidates
    weight = next(tensor for found, tensor in _read_all(target_weights, only=name) if found == name)
    return weight if token_ids is None else weight[token_ids]


def _read_vocabulary(where: Path, weights: Checkpoint, config: HeadConfig) -> Tensor | None:
    """The target's id of each draft token, from ``d2t``, which holds the differences."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    shapes = {DRAFT_TO_TARGET: (config.draft_vocab_size,), TARGET_TO_DRAFT: (config.vocab_size,)}
    for name, shape in shapes.items():
        entry = weights.tensors.get(name)
        if entry is None and name == DRAFT_TO_TARGET:
            raise ModelError(f"{where}: lacks tensor {name}: which tokens the draft vocabulary has")
        if entry is not None and entry.shape != shape:
            raise PairMismatchError(
                f"{where}: vocabulary map {name} has shape {list(entry.shape)}, config.json asks for "
                f"{list(shape)}"
            )
    maps = dict(_read_all(weights, only=(DRAFT_TO_TARGET, TARGET_TO_DRAFT)))
    token_ids = torch.arange(config.draft_vocab_size) + maps[DRAFT_TO_TARGET].long()
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= config.vocab_size:
        raise PairMismatchError(f"{where}: vocabulary map d2t names tokens beyond the {config.vocab_size}")
    if len(set(token_ids.tolist())) != len(token_ids):
        raise ModelError(f"{where}: vocabulary map d2t names a token twice")
    if TARGET_TO_DRAFT in maps:
        stated = maps[TARGET_TO_DRAFT].bool().nonzero().flatten()
        if not torch.equal(stated, token_ids.sort().values):
            raise ModelError(f"{where}: vocabulary maps d2t and t2d name different tokens")
    return token_ids


def _read_all(weights: Checkpoint, only: str | tuple[str, ...] = ()) -> list[tuple[str, Tensor]]:
    """Names and values of the tensors, or of some."""
    wanted = {only} if isinstance(only, str) else set(only)
    found: list[tuple[str, Tensor]] = []
    for path in weights.files:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not wanted or name in wanted]  # noqa: SIM118
            found += [(name, file.get_tensor(name)) for name in names]
    return found
