"""The models that the bench needs, made once and kept in the cache directory."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "server" / "demo")]

import prepare_models  # noqa: E402 (found through the line above)
from support.draft_heads import make_tiny_head  # noqa: E402
from support.tiny_models import make_tiny_model, noised_clone  # noqa: E402

DRAFT_LAYERS = 4


@dataclass(frozen=True)
class Pair:
    """Two model directories."""

    target: Path
    draft: Path


def cache_dir() -> Path:
    return prepare_models.cache_directory()


def smollm2_pair() -> Pair:
    """The demo's target, and its first layers as a draft.

    The draft is untrained as such, so it is hardly ever right; it is there for what it costs.
    """
    target = prepare_models.prepare_target()
    draft = cache_dir() / "bench" / f"{target.name}-first-{DRAFT_LAYERS}-layers"
    if not draft.exists():
        truncate(target, draft, num_layers=DRAFT_LAYERS)
    return Pair(target, draft)


def smollm2_head() -> Pair:
    """The demo's target and its draft head."""
    return Pair(prepare_models.prepare_target(), prepare_models.prepare_head())


def truncate(target: Path, draft: Path, *, num_layers: int) -> None:
    """Saves a copy of a model with only its first layers."""
    model = AutoModelForCausalLM.from_pretrained(target)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:num_layers]
    _save(model, AutoTokenizer.from_pretrained(target), draft)


def tiny_pair() -> Pair:
    """A random model and its noised clone, for smoke tests: seconds instead of minutes."""
    target = cache_dir() / "bench" / "tiny"
    draft = cache_dir() / "bench" / "tiny-draft"
    for directory in (target, draft):
        shutil.rmtree(directory, ignore_errors=True)
    make_tiny_model(target, dtype=torch.bfloat16, max_position_embeddings=2048)
    return Pair(target, noised_clone(target, draft, scale=0.1))


def tiny_head() -> Pair:
    """A random model and a random head for it."""
    target, head = (cache_dir() / "bench" / name for name in ("tiny", "tiny-head"))
    shutil.rmtree(head, ignore_errors=True)
    make_tiny_head(head, target, layer_ids=(0, 1, 2), fc_norm=True, norm_output=True)
    return Pair(target, head)


def _save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Appears under its name only when complete."""
    partial = directory.with_name(f".partial-{directory.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)


@dataclass(frozen=True)
class ModelBytes:
    """What a decode step must read."""

    weights: int
    kv_per_token: int

    def per_step(self, *, num_sequences: int, context: float) -> float:
        return self.weights + num_sequences * context * self.kv_per_token


def model_bytes(path: Path, *, bytes_per_value: int) -> ModelBytes:
    """Counted from the checkpoint; a tied embedding is read once, an untied one by its few rows."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    config = model.config
    values = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        values -= model.get_input_embeddings().weight.numel()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return ModelBytes(values * bytes_per_value, kv_values * bytes_per_value)
