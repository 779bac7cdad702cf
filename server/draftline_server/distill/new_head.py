"""A head before its training: the target's last layer, reading the target's final state.

It begins close to what it should become. The vector that it reads is at first the target's final state,
normed, as the target's output layer reads it; its own vectors are normed too, so that they can take that
one's place.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftline_server.distill import unrolled
from draftline_server.distill.training import Teacher
from draftline_server.errors import ModelError
from draftline_server.model.draft_head import DraftHead
from draftline_server.model.head_config import HeadConfig
from draftline_server.model.hidden_states import decoder_layers

_EMBEDDING_STD = 0.02


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """An early and a late state, and the final one."""
    return tuple(dict.fromkeys((num_layers * 4 // 15, num_layers * 2 // 3, num_layers)))


def make_head_config(
    target: PreTrainedModel, *, layer_ids: tuple[int, ...], draft_vocab_size: int, max_length: int
) -> HeadConfig:
    """A head of one layer, of the target's sizes."""
    config = target.config.get_text_config()
    num_heads = config.num_attention_heads
    layer = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        max_position_embeddings=max(max_length, config.max_position_embeddings),
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(config)},
        tie_word_embeddings=False,
    )
    return HeadConfig(
        layer=layer,
        layer_ids=layer_ids,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=draft_vocab_size,
        fc_norm=True,
        norm_output=True,
    )


@torch.no_grad()
def make_head(
    target: PreTrainedModel, config: HeadConfig, token_ids: Tensor, *, seed: int, device: torch.device
) -> DraftHead:
    """A float32 head around a target that is loaded unpacked; `token_ids` are those it may propose."""
    unrolled.register()
    embedding: Tensor = cast(Any, target).get_input_embeddings().weight.detach().float().to(device)
    generator = torch.Generator().manual_seed(random.Random(f"{seed}/head").getrandbits(63))
    head = DraftHead(config, embedding=embedding, attention=unrolled.IMPLEMENTATION).float()
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter.shape[1] ** 0.5)
    size = config.layer.hidden_size
    scale = norm_scale(_final_norm(target), size)
    head.fc.weight.zero_()
    place = config.layer_ids.index(max(config.layer_ids))
    head.fc.weight[:, place * size : (place + 1) * size] = torch.eye(size)
    cast(Any, head.fc_norm)[place].weight.copy_(scale)
    head.norm.weight.copy_(scale)
    head.lm_head.weight.copy_(cast(Any, target).get_output_embeddings().weight.detach()[token_ids])
    head.lm_head.weight.requires_grad_(False)
    _copy_layer(decoder_layers(target)[-1], head.layers[0], generator)
    return head.to(device)


def check_target(path: Path) -> None:
    """Raises `ModelError` for a target that no head can be made for, without loading it."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    if not is_rms_norm(_final_norm(target)):
        raise ModelError(f"--target: a {type(target).__name__} has no RMS norm before its output layer")


def make_teacher(target: PreTrainedModel) -> Teacher:
    """What turns the last hidden states of a target that was checked into its distributions."""
    config = target.config.get_text_config()
    return Teacher(
        norm_scale=norm_scale(_final_norm(target), config.hidden_size),
        epsilon=getattr(config, "rms_norm_eps", None) or 1e-5,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def norm_scale(norm: nn.Module | None, size: int) -> Tensor:
    """What an RMS norm multiplies with, however its class stores that; ones for anything else."""
    if not is_rms_norm(norm):
        return torch.ones(size)
    assert norm is not None
    weight = next(norm.parameters())
    scale: Tensor = norm(torch.ones(1, size, dtype=weight.dtype, device=weight.device))[0]
    return scale.detach().float().cpu()


def is_rms_norm(norm: nn.Module | None) -> bool:
    return norm is not None and "RMSNorm" in type(norm).__name__


def _final_norm(target: PreTrainedModel) -> nn.Module | None:
    return getattr(target.base_model, "norm", None)


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", 10000.0))


def _copy_layer(source: Any, layer: Any, generator: torch.Generator) -> None:
    """Takes over what has the same shape; the half that reads the embedding begins small."""
    size = layer.hidden_norm.weight.shape[0]
    # Gemma has norms behind attention and MLP, too, so the one before the MLP has another name there.
    before_mlp = "pre_feedforward_layernorm"
    if not hasattr(source, before_mlp):
        before_mlp = "post_attention_layernorm"
    names = {"hidden_norm": "input_layernorm", "post_attention_layernorm": before_mlp}
    for own, its in names.items():
        getattr(layer, own).weight.copy_(norm_scale(getattr(source, its, None), size))
    for part, linears in (("self_attn", ("q", "k", "v", "o")), ("mlp", ("gate", "up", "down"))):
        for linear in linears:
            theirs = getattr(getattr(source, part, None), f"{linear}_proj", None)
            if not isinstance(theirs, nn.Linear):
                continue
            mine: Tensor = getattr(getattr(layer, part), f"{linear}_proj").weight
            if mine.shape == theirs.weight.shape:
                mine.copy_(theirs.weight)
            elif mine.shape[0] == theirs.weight.shape[0] and mine.shape[1] == 2 * theirs.weight.shape[1]:
                mine[:, :size] = torch.randn(mine[:, :size].shape, generator=generator) * _EMBEDDING_STD
                mine[:, size:] = theirs.weight
