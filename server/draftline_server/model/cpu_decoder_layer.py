"""A decoder layer in a dozen calls of our kernels, in place of some sixty small operations.

On a CPU a small model spends more time between its products than in them. Layers of the Llama shape
(pre-norms, rotary positions, gated SiLU, no window) are replaced by one that computes the same; which layers
those are is not told by their names but found out, by comparing results. All others stay as they are.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftline_server.model import cpu_kernels
from draftline_server.model.attention import PagedContext, SequenceSpan, attend, build_context, usable_kernels
from draftline_server.model.cpu_kernels import CpuKernels
from draftline_server.model.cpu_layers import FusedPart, KernelLinear, KernelRmsNorm
from draftline_server.model.draft_head import DraftHead
from draftline_server.model.kv_cache import KVCache

_CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PROBE_TOKENS = 3
# Relative. Where inputs are rounded to bfloat16, a difference of their last bit may become one of eight bits.
_TOLERANCE, _ROUNDING_TOLERANCE = 1e-5, 2e-3


class KernelDecoderLayer(nn.Module):
    """Takes and returns what the layer that it replaces did, ``[1, T, hidden]`` float32."""

    def __init__(self, layer: Any, kernels: CpuKernels) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._kernels = kernels
        self._layer_idx = attention.layer_idx
        self._scaling = attention.scaling
        self._input_norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv, self._output = attention.q_proj.fused.linear, attention.o_proj
        self._gate_up, self._down = mlp.gate_proj.fused.linear, mlp.down_proj
        self._q_norm, self._k_norm, self._epsilon = None, None, 0.0
        if hasattr(attention, "q_norm"):
            self._q_norm, self._k_norm = attention.q_norm.weight, attention.k_norm.weight
            self._epsilon = attention.q_norm.epsilon

    @property
    def rounds_inputs(self) -> bool:
        return bool(self._output.rounds_inputs)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedContext,
        **_: Any,
    ) -> Tensor:
        return self._compute(self._input_norm(hidden_states), hidden_states, position_embeddings, paged)

    def _compute(
        self, read: Tensor, residual: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: PagedContext
    ) -> Tensor:
        """`read` is what attention looks at, `residual` what its output is added to."""
        layer, cache = self._layer_idx, paged.cache
        cos, sin = position_embeddings
        queries = self._kernels.rotate_and_store(
            self._qkv(read)[0],
            cos,
            sin,
            cache.keys[layer],
            cache.values[layer],
            paged.slots,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            epsilon=self._epsilon,
        )
        attended = attend(paged, layer, queries, scaling=self._scaling)
        hidden_states: Tensor = residual + self._output(attended.view(1, attended.shape[0], -1))
        activated = self._kernels.gated_silu(self._gate_up(self._mlp_norm(hidden_states)))
        return hidden_states + cast(Tensor, self._down(activated))


class KernelFirstLayer(KernelDecoderLayer):
    """The same for the first layer of a draft head, which reads an embedding and a vector side by side."""

    def __init__(self, layer: Any, kernels: CpuKernels) -> None:
        super().__init__(layer, kernels)
        self._vector_norm = layer.hidden_norm
        self._norm_before_residual = layer.norm_before_residual

    def forward(  # type: ignore[override]
        self,
        embedded: Tensor,
        vectors: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedContext,
        **_: Any,
    ) -> Tensor:
        normed = self._vector_norm(vectors)
        read = torch.cat([self._input_norm(embedded), normed], dim=-1)
        residual = normed if self._norm_before_residual else vectors
        return self._compute(read, residual, position_embeddings, paged)


def fuse_head_layers(head: DraftHead) -> None:
    """As `fuse_decoder_layers`, for a packed float32 draft head."""
    kernels, config = cpu_kernels.load(), head.config.layer
    if kernels is None or getattr(config, "sliding_window", None) is not None:
        return
    for index, layer in enumerate(head.layers):
        kind, extra, num_inputs = (
            (KernelDecoderLayer, set(), 1) if index else (KernelFirstLayer, {"hidden_norm"}, 2)
        )
        if _has_all_parts(layer, extra):
            fused = kind(layer, kernels)
            if _compute_the_same(layer, fused, config, num_inputs=num_inputs):
                head.layers[index] = fused


def fuse_decoder_layers(model: PreTrainedModel) -> None:
    """Replaces the layers of a packed float32 model that can be; the others stay as they are."""
    kernels = cpu_kernels.load()
    config = model.config.get_text_config()
    if kernels is None or getattr(config, "sliding_window", None) is not None:
        return
    for container in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(container):
            if _has_all_parts(layer):
                fused = KernelDecoderLayer(layer, kernels)
                if _compute_the_same(layer, fused, config):
                    container[index] = fused


def _has_all_parts(layer: Any, extra: Set[str] = frozenset()) -> bool:
    """Whether the layer's parts are those of the Llama shape, and our kernels compute them all."""
    if {name for name, _ in layer.named_children()} != _CHILDREN | extra:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears: list[object] = [
        *(part.fused.linear for part in (_part(attention, "q_proj"), _part(mlp, "gate_proj")) if part),
        getattr(attention, "o_proj", None),
        getattr(mlp, "down_proj", None),
    ]
    head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    others = [getattr(layer, name) for name in extra]
    norms: list[object] = [layer.input_layernorm, layer.post_attention_layernorm, *head_norms, *others]
    return (
        len(linears) == 4
        and all(isinstance(linear, KernelLinear) for linear in linears)
        and len(head_norms) in (0, 2)
        and all(isinstance(norm, KernelRmsNorm) for norm in norms)
    )


def _part(module: nn.Module, name: str) -> FusedPart | None:
    part = getattr(module, name, None)
    return part if isinstance(part, FusedPart) else None


@torch.inference_mode()
def _compute_the_same(
    layer: nn.Module, fused: KernelDecoderLayer, config: Any, *, num_inputs: int = 1
) -> bool:
    """Whether both give the same output for a few random tokens, and leave the same in the cache."""
    num_heads, hidden_size = config.num_attention_heads, config.hidden_size
    num_kv_heads = getattr(config, "num_key_value_heads", num_heads)
    head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, _PROBE_TOKENS, hidden_size, generator=generator) for _ in range(num_inputs)]
    angles = torch.rand(2, 1, _PROBE_TOKENS, head_dim, generator=generator)
    results: list[Tensor] = []
    tolerance = _ROUNDING_TOLERANCE if fused.rounds_inputs else _TOLERANCE
    for candidate in (layer, fused):
        cache = KVCache(
            num_layers=config.num_hidden_layers,
            num_blocks=1,
            block_size=_PROBE_TOKENS,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        kernels = usable_kernels(cache, num_heads=num_heads)
        if kernels is None:
            return False
        span = SequenceSpan(0, _PROBE_TOKENS, _PROBE_TOKENS, (0,))
        context = build_context(cache, torch.arange(_PROBE_TOKENS), [span], kernels=kernels)
        output = candidate(
            *inputs,
            **({"attention_mask": None} if num_inputs == 1 else {}),
            position_ids=torch.arange(_PROBE_TOKENS)[None],
            position_embeddings=(angles[0], angles[1]),
            paged=context,
        )
        # Without what only passes through, which is larger by far than what a layer adds.
        results += [output[0] - inputs[-1][0], cache.keys, cache.values]
    return all(
        float((own - its).norm()) <= tolerance * float(its.norm())
        for its, own in zip(results[:3], results[3:], strict=True)
    )
