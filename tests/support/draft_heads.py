"""Tiny random draft heads as published ones are laid out, and a second, plain way to compute their drafts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from draftline_server.config import ModelConfig
from draftline_server.distill import unrolled
from draftline_server.model.draft_head import DraftHead
from draftline_server.model.head_checkpoint import own_name
from draftline_server.model.startup import inspect_head, inspect_model

LayerType = Literal["llama", "qwen3"]
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

_HEADS, _KV_HEADS = 4, 2


def make_tiny_head(
    directory: Path,
    target: Path,
    *,
    seed: int = 0,
    layer_type: LayerType = "llama",
    layer_ids: Sequence[int] | None = (0, 1, 2),
    layers: int = 1,
    draft_vocab_size: int | None = None,
    has_embedding: bool = False,
    has_output: bool = True,
    older: bool = False,
    logit_scale: float = 3.0,
    **flags: bool,
) -> Path:
    """Writes a head for a target. `older` is the layout of the EAGLE authors."""
    config = AutoConfig.from_pretrained(target)
    size, vocab_size = config.hidden_size, config.vocab_size
    draft_vocab_size = draft_vocab_size or vocab_size
    layer = {
        "model_type": layer_type,
        "vocab_size": vocab_size,
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": size // _HEADS,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    num_read = 3 if layer_ids is None else len(layer_ids)
    generator = torch.Generator().manual_seed(seed)
    shapes = _shapes(layer, num_read, draft_vocab_size, flags)
    if not has_embedding:
        del shapes["embed_tokens.weight"]
    if not has_output:
        del shapes["lm_head.weight"]
    tensors = {name: _draw(name, shape, generator, logit_scale) for name, shape in shapes.items()}
    if draft_vocab_size < vocab_size:
        token_ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = token_ids - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).scatter_(0, token_ids, True)
    directory.mkdir(parents=True)
    if older:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        document: dict[str, Any] = {
            **layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft_vocab_size,
            **flags,
        }
        if layer_ids is not None:
            document["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    else:
        document = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": str(target), "architectures": config.architectures},
            },
            "transformer_layer_config": layer,
            "draft_vocab_size": draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": None if layer_ids is None else list(layer_ids),
            **flags,
        }
    (directory / "config.json").write_text(json.dumps(document))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _shapes(
    layer: dict[str, Any], num_read: int, draft_vocab_size: int, flags: dict[str, bool]
) -> dict[str, tuple[int, ...]]:
    size, inner, head_dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (layer["vocab_size"], size),
        "fc.weight": (size, num_read * size),
        "norm.weight": (size,),
        "lm_head.weight": (draft_vocab_size, size),
        "layers.0.hidden_norm.weight": (size,),
    }
    for index in range(layer["num_hidden_layers"]):
        width = 2 * size if index == 0 else size
        prefix = f"layers.{index}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (size,),
            f"{prefix}post_attention_layernorm.weight": (size,),
            f"{prefix}self_attn.q_proj.weight": (_HEADS * head_dim, width),
            f"{prefix}self_attn.k_proj.weight": (_KV_HEADS * head_dim, width),
            f"{prefix}self_attn.v_proj.weight": (_KV_HEADS * head_dim, width),
            f"{prefix}self_attn.o_proj.weight": (size, _HEADS * head_dim),
            f"{prefix}mlp.gate_proj.weight": (inner, size),
            f"{prefix}mlp.up_proj.weight": (inner, size),
            f"{prefix}mlp.down_proj.weight": (size, inner),
        }
        if layer["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{n}_norm.weight": (head_dim,) for n in ("q", "k")}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_read * size,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (size,) for index in range(num_read)}
    return shapes


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator, logit_scale: float) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1.0 + 0.2 * values
    if name == "embed_tokens.weight":
        return values
    return values * ((logit_scale if name == "lm_head.weight" else 1.4) / math.sqrt(shape[1]))


@torch.inference_mode()
def fit_output(
    directory: Path, target: Path, *, seed: int = 0, num_texts: int = 48, length: int = 40
) -> Path:
    """Gives a random head the output layer that guesses best, so that some of its drafts stand.

    By least squares, from the head's vectors over texts of the target to the target's own logits.
    """
    reference = ReferenceHead(directory, target)
    generator = torch.Generator().manual_seed(seed)
    vocab_size = reference.model.config.vocab_size
    reference.model.generation_config.eos_token_id = None
    vectors, logits = [], []
    for _ in range(num_texts):
        prompt = torch.randint(4, vocab_size, (1, 8), generator=generator)
        text = reference.model.generate(prompt, max_new_tokens=length, do_sample=False, pad_token_id=0)[
            0
        ].tolist()
        fused = reference.fuse(reference.captured(text)[:-1])
        vectors.append(reference.normed(reference._forward(text[1:], fused, first_position=1)))
        logits.append(reference.model(torch.tensor([text]), use_cache=False).logits[0, 1:].float())
    x, y = torch.cat(vectors), torch.cat(logits)
    weight = torch.linalg.lstsq(x.T @ x + 1e-3 * torch.eye(x.shape[1]), x.T @ y).solution.T
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if "t2d" in tensors:
        weight = weight[tensors["t2d"]]
    save_file(tensors | {"lm_head.weight": weight.contiguous()}, path, metadata={"format": "pt"})
    return directory


def load_unrolled_head(directory: Path, target: Path) -> DraftHead:
    """A head as it is trained, in float32."""
    unrolled.register()
    inspected = inspect_model(ModelConfig(path=target), role="target", where=torch.device("cpu"))
    found = inspect_head(ModelConfig(path=directory), inspected, where=torch.device("cpu"))
    embedding = None
    if not found.checkpoint.has_embedding:
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        embedding = model.get_input_embeddings().weight.detach()
    head = DraftHead(found.head, embedding=embedding, attention=unrolled.IMPLEMENTATION)
    tensors = {own_name(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    head.load_state_dict({name: tensors[name] for name in head.state_dict()})
    return head.eval()


class ReferenceHead:
    """A head computed without caches: for each draft token, everything anew from the committed tokens."""

    def __init__(self, directory: Path, target: Path) -> None:
        self._directory, self._target = directory, target
        self._document = json.loads((directory / "config.json").read_text())
        self._layer = self._document.get("transformer_layer_config", self._document)
        nested = self._document.get("eagle_config", {})
        stated = {**self._document, **nested}.get("eagle_aux_hidden_state_layer_ids")
        num_layers = AutoConfig.from_pretrained(target).num_hidden_layers
        self.layer_ids = stated or [2, num_layers // 2, num_layers - 3]

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._target, dtype=torch.float32).eval()

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        tensors = load_file(self._directory / "model.safetensors")
        return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}

    @torch.inference_mode()
    def captured(self, token_ids: Sequence[int]) -> Tensor:
        """The target's hidden states of each token, ``[tokens, layers * size]``."""
        kept: list[Tensor] = []
        hook = self.model.base_model.layers[-1].register_forward_hook(lambda *call: kept.append(call[2]))
        output = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
        hook.remove()
        last = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
        states = [*output.hidden_states[:-1], last]
        return torch.cat([states[layer_id][0] for layer_id in self.layer_ids], dim=-1)

    @torch.inference_mode()
    def draft(self, token_ids: Sequence[int], length: int, *, start: int = 1) -> list[int]:
        """The greedy draft after committed tokens; slots before `start` are left out."""
        captured = self.captured(token_ids)[start - 1 : -1]
        vectors = self.fuse(captured)
        fed = list(token_ids[start:])
        drafted: list[int] = []
        for _ in range(length):
            outputs = self._forward(fed, vectors, first_position=start)
            logits = self._logits(outputs[-1])
            drafted.append(self._target_id(int(logits.argmax())))
            fed.append(drafted[-1])
            vectors = torch.cat([vectors, outputs[-1:]])
        return drafted

    @torch.inference_mode()
    def fuse(self, captured: Tensor) -> Tensor:
        weights = self._weights
        if self._document.get("norm_before_fc"):
            captured = self._norm(captured, "input_norm.weight")
        if self._document.get("fc_norm"):
            parts = captured.chunk(len(self.layer_ids), dim=-1)
            normed = [self._norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(parts)]
            captured = torch.cat(normed, dim=-1)
        return functional.linear(captured, weights["fc.weight"])

    def normed(self, vectors: Tensor) -> Tensor:
        """What the output layer reads."""
        return vectors if self._document.get("norm_output") else self._norm(vectors, "norm.weight")

    def _logits(self, vector: Tensor) -> Tensor:
        normed = self.normed(vector)
        weight = self._weights.get("lm_head.weight")
        if weight is None:
            weight = self.model.get_output_embeddings().weight
            if "t2d" in self._weights:
                weight = weight[self._weights["t2d"]]
        return functional.linear(normed, weight)

    def _target_id(self, draft_id: int) -> int:
        d2t = self._weights.get("d2t")
        return draft_id if d2t is None else draft_id + int(d2t[draft_id])

    def _forward(self, token_ids: Sequence[int], vectors: Tensor, *, first_position: int) -> Tensor:
        embedding = self._weights.get("embed_tokens.weight")
        if embedding is None:
            embedding = self.model.get_input_embeddings().weight
        embedded = embedding[torch.tensor(list(token_ids))]
        normed = self._norm(vectors, "layers.0.hidden_norm.weight")
        read = torch.cat([self._norm(embedded, "layers.0.input_layernorm.weight"), normed], dim=-1)
        residual = normed if self._document.get("norm_before_residual") else vectors
        vectors = self._after_attention(0, residual, read, first_position)
        for index in range(1, self._layer["num_hidden_layers"]):
            read = self._norm(vectors, f"layers.{index}.input_layernorm.weight")
            vectors = self._after_attention(index, vectors, read, first_position)
        return self._norm(vectors, "norm.weight") if self._document.get("norm_output") else vectors

    def _after_attention(self, index: int, residual: Tensor, read: Tensor, first_position: int) -> Tensor:
        prefix = f"layers.{index}."
        vectors = residual + self._attend(f"{prefix}self_attn.", read, first_position)
        normed = self._norm(vectors, f"{prefix}post_attention_layernorm.weight")
        gate, up = (
            functional.linear(normed, self._weights[f"{prefix}mlp.{n}_proj.weight"]) for n in ("gate", "up")
        )
        down = self._weights[f"{prefix}mlp.down_proj.weight"]
        return vectors + functional.linear(functional.silu(gate) * up, down)

    def _attend(self, prefix: str, read: Tensor, first_position: int) -> Tensor:
        num_tokens, head_dim = len(read), self._layer["head_dim"]
        q, k, v = (
            functional.linear(read, self._weights[f"{prefix}{n}_proj.weight"])
            .view(num_tokens, -1, head_dim)
            .transpose(0, 1)
            for n in "qkv"
        )
        if self._layer["model_type"] == "qwen3":
            q, k = (self._norm(x, f"{prefix}{n}_norm.weight") for n, x in (("q", q), ("k", k)))
        positions = torch.arange(first_position, first_position + num_tokens)
        q, k = (_rotate(x, positions) for x in (q, k))
        attended = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        flat = attended.transpose(0, 1).reshape(num_tokens, -1)
        return functional.linear(flat, self._weights[f"{prefix}o_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._layer["rms_norm_eps"])
        return x * scale * self._weights[name]


def _rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
