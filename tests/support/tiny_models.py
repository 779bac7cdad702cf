"""Tiny random models that behave like real ones where it matters, made in milliseconds.

The usual initialisation (standard deviation 0.02) gives a model that repeats one token whatever it reads, so
that almost any bug goes unseen. Here every matrix is scaled by its fan-in: attention depends on far tokens,
norms and biases are not the identity, and greedy output is varied. `make_tiny_model` is deterministic in its
arguments; another seed is an unrelated model, and `noised_clone` is a model that agrees in part.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.pytorch_utils import Conv1D

from support.tiny_tokenizers import (
    BOS_ID,
    DEFAULT_VOCAB_SIZE,
    EOS_IDS,
    TokenizerKind,
    make_tokenizer,
)

Family = Literal["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2"]
FAMILIES: tuple[Family, ...] = get_args(Family)

SLIDING_WINDOW = 16
"""Of the Gemma families' first layer and every second one after it."""

_HEADS, _KV_HEADS = 4, 2


def make_tiny_model(
    directory: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    hidden_size: int = 64,
    layers: int = 2,
    max_position_embeddings: int = 1024,
    dtype: torch.dtype = torch.float32,
    tokenizer: TokenizerKind | None = "bytes",
    tokenizer_vocab_size: int | None = None,
    logit_scale: float = 3.0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes a complete model directory, tokenizer included, and returns it.

    ``vocab_size`` above ``tokenizer_vocab_size`` (default: the kind's own) gives padded embedding rows.
    ``logit_scale`` is the standard deviation of the logits: how sure of itself the model is.
    ``overrides`` go to the family's config.
    """
    config = _build_config(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        max_position_embeddings=max_position_embeddings,
        **overrides,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _initialize(model, seed=seed, logit_scale=logit_scale)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_IDS, pad_token_id=EOS_IDS[0]
    )
    nn.Module.to(model, dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer is not None:
        make_tokenizer(directory, kind=tokenizer, vocab_size=tokenizer_vocab_size)
    return directory


def noised_clone(source: Path, destination: Path, *, scale: float, seed: int = 0) -> Path:
    """Copies a model with noise on every weight, of ``scale`` times the tensor's standard deviation.

    As a draft of its source, 0 is accepted always and 1 hardly ever.
    """
    destination.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copy2(path, destination / path.name)
            continue
        tensors = load_file(path)
        noised = {name: _add_noise(tensors[name], scale, generator) for name in sorted(tensors)}
        save_file(noised, destination / path.name, metadata={"format": "pt"})
    return destination


def _add_noise(tensor: torch.Tensor, scale: float, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    exact = tensor.float()
    noise = torch.randn(tensor.shape, generator=generator) * (scale * float(exact.std()))
    return (exact + noise).to(tensor.dtype)


def _build_config(
    family: Family,
    *,
    vocab_size: int,
    hidden_size: int,
    num_hidden_layers: int,
    max_position_embeddings: int,
    **overrides: Any,
) -> PreTrainedConfig:
    head_dim = hidden_size // _HEADS
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "max_position_embeddings": max_position_embeddings,
        "num_attention_heads": _HEADS,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_IDS,
        "pad_token_id": EOS_IDS[0],
    }
    grouped: dict[str, Any] = {"num_key_value_heads": _KV_HEADS, "intermediate_size": 2 * hidden_size}
    gemma: dict[str, Any] = {
        "head_dim": 2 * head_dim,  # as in the real ones, heads * head_dim is not the hidden size
        "query_pre_attn_scalar": head_dim,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_hidden_layers)
        ],
        "final_logit_softcapping": 8.0,
    }
    builders: dict[Family, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
        "llama": (LlamaConfig, grouped),
        "qwen2": (Qwen2Config, grouped | {"tie_word_embeddings": True}),
        "qwen3": (Qwen3Config, grouped | {"head_dim": head_dim}),
        "mistral": (MistralConfig, grouped | {"sliding_window": None, "head_dim": head_dim}),
        # NOTE: transformers' Gemma 3 has the key attn_logit_softcapping, too, but no code that uses it.
        "gemma2": (Gemma2Config, grouped | gemma | {"attn_logit_softcapping": 2.0}),
        "gemma3": (Gemma3TextConfig, grouped | gemma),
        "gpt2": (GPT2Config, {"n_inner": 2 * hidden_size}),
    }
    config_class, own = builders[family]
    return config_class(**(common | own | overrides))


@torch.no_grad()
def _initialize(model: PreTrainedModel, *, seed: int, logit_scale: float) -> None:
    """Draws every parameter anew, in an order that depends on the architecture alone."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    # A tied embedding is also the head, so that its rows set how large the logits are.
    head_std = logit_scale / math.sqrt(model.config.hidden_size)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            std = 0.1 if name.endswith("wpe") else head_std if tied else 1.0  # GPT-2's positions are small
            _draw(module.weight, std, generator)
        elif module is model.get_output_embeddings():
            if not tied:
                _draw(module.weight, head_std, generator)
        elif isinstance(module, nn.Linear | Conv1D):
            fan_in = module.weight.shape[1 if isinstance(module, nn.Linear) else 0]
            _draw(module.weight, 1.4 / math.sqrt(fan_in), generator)
        elif isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            _draw_norm(name.rpartition(".")[2], weight, generator)
        if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
            _draw(bias, 0.1, generator)


def _draw(tensor: torch.Tensor, std: float, generator: torch.Generator) -> None:
    tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)


def _draw_norm(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Draws the scales of a norm, which classes store as they are (ones) or less one (zeros, Gemma)."""
    offset = 1.0 - float(weight[0])
    if name in {"norm", "ln_f"}:
        # The last norm flips signs: a tied head would otherwise always repeat the token just read.
        scales = torch.randint(0, 2, weight.shape, generator=generator) * 2.0 - 1.0
    else:
        scales = 1.0 + 0.2 * torch.randn(weight.shape, generator=generator)
    if name.startswith("post_") and offset:
        scales *= 3.0  # Gemma's embeddings are large; what the layers add has to show beside them
    weight.copy_(scales - offset)
