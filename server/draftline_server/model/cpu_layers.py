"""Layers as a CPU likes them: norms as one call, linear weights repacked once and not in every call.

`F.linear` in bfloat16 repacks its weight each time where the CPU has bfloat16 instructions, and falls
back to a scalar loop where it has none. What replaces it:

    our kernels              weights as they are, activations and cache in float32; on CPUs that multiply
                             bfloat16 an input is rounded to it on its way into a product
    no compiler, no AVX2     oneDNN's prepacked linear: everything in bfloat16 where the CPU has such
                             instructions, else weights are widened to float32 (which is exact)

On a GPU nothing is replaced.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from draftline_server.model import cpu_kernels
from draftline_server.model.cpu_kernels import CpuKernels


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations and cache for weights of `dtype`."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return dtype
    is_widened = cpu_kernels.load() is not None or not has_native_bfloat16()
    return torch.float32 if is_widened else dtype


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Changes the dtype of weights. Buffers stay: rotary frequencies in bfloat16 would be other angles."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


class KernelLinear(nn.Module):
    """A linear layer with float32 activations and weights ``[out, in]`` packed for our kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: CpuKernels) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kernels = kernels
        # Plain attributes: a later change of the model's dtype must not touch them.
        self._packed = kernels.pack(weight.detach())
        self._bias = None if bias is None else bias.detach().float()

    @property
    def rounds_inputs(self) -> bool:
        return self._packed.rounds_inputs

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._packed, self._bias)


class OneDnnLinear(nn.Module):
    """A linear layer whose weight ``[out, in]`` oneDNN has reordered."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        dtype = compute_dtype(weight.dtype, weight.device)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype).contiguous())
        self._bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


class KernelRmsNorm(nn.Module):
    """``x / rms(x) * weight`` in one call instead of eight."""

    def __init__(self, weight: Tensor, epsilon: float, kernels: CpuKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self.epsilon)


def pack_norm(norm: nn.Module) -> KernelRmsNorm | None:
    """Our version of a norm that is an RMS norm; None for anything else.

    Architectures name and write it differently (some scale by 1 + weight), so what counts is that both
    compute the same.
    """
    kernels = cpu_kernels.load()
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    if kernels is None or "RMSNorm" not in type(norm).__name__:
        return None
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    scale = weight.detach().float()
    probe = torch.linspace(-3.0, 5.0, 2 * scale.shape[0]).view(2, -1)
    expected = copy.deepcopy(norm).float()(probe)
    for candidate in (scale.clone(), 1.0 + scale):
        packed = KernelRmsNorm(candidate, epsilon, kernels)
        if torch.allclose(packed(probe), expected, rtol=1e-5, atol=1e-6):
            return packed
    return None


def pack_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The best replacement that this machine has."""
    kernels = cpu_kernels.load()
    if kernels is not None and compute_dtype(weight.dtype, weight.device) == torch.float32:
        return KernelLinear(weight, bias, kernels)
    return OneDnnLinear(weight, bias)


class FusedLinear:
    """Several linear layers that read the same input, computed as one.

    The model goes on calling its own layers one by one; each is a `FusedPart`. The first
    call computes all of them, the others take their share.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        biases = [linear.bias for linear in linears]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        self.linear = pack_linear(torch.cat([linear.weight for linear in linears]), bias)
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, x: Tensor, index: int) -> Tensor:
        """The output of part `index` for input `x`."""
        if self._input is not x:
            self._input = x
            self._outputs = self.linear(x).split(self._sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            # Kept until the next step, they would add up over all layers.
            self._input, self._outputs = None, ()
        return output


class FusedPart(nn.Module):
    """Stands where one of the fused layers stood."""

    def __init__(self, fused: FusedLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.fused = fused
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.output(x, self._index)


# Names of sibling layers that every supported architecture calls with one and the same tensor.
FUSED_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def replace_layers(model: nn.Module) -> None:
    """Replaces every linear layer and RMS norm of a CPU model that will compute in float32 or bfloat16."""
    weight = next(model.parameters())
    computes_float32 = compute_dtype(weight.dtype, weight.device) == torch.float32
    for module in list(model.modules()):
        for names in FUSED_SIBLINGS:
            _fuse(module, names)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, pack_linear(child.weight, child.bias))
            elif computes_float32 and (norm := pack_norm(child)) is not None:
                setattr(module, name, norm)


def _fuse(module: nn.Module, names: tuple[str, ...]) -> None:
    linears = [getattr(module, name, None) for name in names]
    found = [linear for linear in linears if isinstance(linear, nn.Linear)]
    if len(found) != len(names) or len({linear.bias is None for linear in found}) > 1:
        return
    fused = FusedLinear(found)
    for index, (name, linear) in enumerate(zip(names, found, strict=True)):
        setattr(module, name, FusedPart(fused, index, linear))
