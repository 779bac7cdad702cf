"""A draft head: one layer or a few that guess the target's next tokens from its hidden states (EAGLE-3).

    fuse      hidden states of several target layers, side by side → one vector g
    forward   for token x[i] and the vector of the token before it → a vector that takes g's place
    logits    what that vector says of token x[i + 1], over the draft vocabulary

While drafting, its own vector stands in for the g that the target has not computed yet. See Li et al.,
arXiv 2503.01840. Layers are transformers' own, with the first one's projections widened; names of
parameters are those of published checkpoints.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from draftline_server.model.head_config import HeadConfig


class DraftHead(nn.Module):
    """Computes for packed tokens ``[1, T]``, with the cache that the attention keywords name."""

    def __init__(self, config: HeadConfig, *, embedding: Tensor | None, attention: str) -> None:
        """`embedding` ``[vocab, hidden size]`` is the target's where the head has none of its own."""
        super().__init__()
        self.config = config
        layer, size = config.layer, config.layer.hidden_size
        layer._attn_implementation = attention
        epsilon = layer.rms_norm_eps
        num_captured = len(config.layer_ids)
        # A plain attribute, so that the target's is neither moved nor saved with the head.
        self._target_embedding = embedding
        if embedding is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(config.captured_size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(config.captured_size, eps=epsilon)
        if config.fc_norm:
            norms = [LlamaRMSNorm(config.target_hidden_size, eps=epsilon) for _ in range(num_captured)]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(
            [FirstLayer(layer, norm_before_residual=config.norm_before_residual)]
            + [_decoder_layer(layer, index) for index in range(1, layer.num_hidden_layers)]
        )
        self.rotary_emb = LlamaRotaryEmbedding(cast(Any, layer))
        self.norm = LlamaRMSNorm(size, eps=epsilon)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """``[..., hidden size]``."""
        weight = self.embed_tokens.weight if self._target_embedding is None else self._target_embedding
        return functional.embedding(token_ids, weight)

    def fuse(self, captured: Tensor) -> Tensor:
        """The target's hidden states ``[..., layers * target hidden size]`` as ``[..., hidden size]``."""
        if self.config.norm_before_fc:
            captured = self.input_norm(captured)
        if self.config.fc_norm:
            parts = captured.chunk(len(self.fc_norm), dim=-1)
            captured = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return cast(Tensor, self.fc(captured))

    def forward(self, token_ids: Tensor, vectors: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Vectors ``[batch, T, hidden size]`` to read logits from, and to feed back.

        `token_ids` and `positions` are ``[batch, T]``; `vectors` belong to the tokens before.
        """
        embedded = self.embed(token_ids).to(vectors.dtype)
        attention["position_embeddings"] = self.rotary_emb(vectors, positions)
        first, *others = self.layers
        vectors = first(embedded, vectors, **attention)
        for layer in others:
            vectors = layer(vectors, **attention)
        return cast(Tensor, self.norm(vectors)) if self.config.norm_output else vectors

    def logits(self, vectors: Tensor) -> Tensor:
        """``[..., draft vocabulary]``."""
        return cast(Tensor, self.lm_head(vectors if self.config.norm_output else self.norm(vectors)))


class FirstLayer(nn.Module):
    """A decoder layer that reads the token's embedding and the vector of the token before, side by side."""

    def __init__(self, config: PreTrainedConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        layer: Any = _decoder_layer(config, 0)
        self.norm_before_residual = norm_before_residual
        self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(self, embedded: Tensor, vectors: Tensor, **attention: Any) -> Tensor:
        normed = self.hidden_norm(vectors)
        residual = normed if self.norm_before_residual else vectors
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=read, attention_mask=None, **attention)
        vectors = residual + attended
        return vectors + cast(Tensor, self.mlp(self.post_attention_layernorm(vectors)))


def _decoder_layer(config: PreTrainedConfig, index: int) -> nn.Module:
    kind: Any = Qwen3DecoderLayer if config.model_type == "qwen3" else LlamaDecoderLayer
    return cast(nn.Module, kind(config, index))
