"""The kernels compute what torch computes, and a row's result does not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from draftline_server.model import cpu_kernels
from draftline_server.model.cpu_kernels import CpuKernels

# Rows below, at and above the height of a block, of one tile and of two, and more than one thread rounds.
ROWS = (1, 2, 6, 7, 11, 12, 13, 16, 17, 32, 33, 50, 64, 100)
SHAPES = ((16, 32), (100, 50), (7, 32), (96, 64), (33, 1))


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = cpu_kernels.load()
    if found is None:
        pytest.skip("this machine cannot have the CPU kernels")
    return found


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_avx2_linear(
    kernels: CpuKernels, shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool
) -> None:
    weight, bias = _random(*shape).to(dtype), _random(shape[0], seed=1) if has_bias else None
    on_avx2 = kernels.variants()[-1]
    packed = on_avx2.pack(weight)
    for rows in ROWS:
        x = _random(rows, shape[1], seed=rows)
        result = on_avx2.linear(x, packed, bias)
        torch.testing.assert_close(result, functional.linear(x, weight.float(), bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_linear_with_rounded_inputs(kernels: CpuKernels, shape: tuple[int, int], *, has_bias: bool) -> None:
    *rounding, _ = kernels.variants()
    if not rounding:
        pytest.skip("this machine multiplies no bfloat16")
    weight, bias = _random(*shape).bfloat16(), _random(shape[0], seed=1) if has_bias else None
    for variant in rounding:
        packed = variant.pack(weight)
        assert packed.rounds_inputs
        assert variant.linear(torch.empty(0, shape[1]), packed, bias).shape == (0, shape[0])
        for rows in ROWS:
            x = _random(rows, shape[1], seed=rows)
            expected = functional.linear(x.bfloat16().float(), weight.float(), bias)
            torch.testing.assert_close(variant.linear(x, packed, bias), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_computed_the_same_in_any_company(kernels: CpuKernels, dtype: torch.dtype) -> None:
    weight, x = _random(70, 100).to(dtype), _random(max(ROWS), 100, seed=1)
    for variant in kernels.variants():
        packed = variant.pack(weight)
        together = variant.linear(x, packed, None)
        for rows in ROWS:
            assert torch.equal(variant.linear(x[-rows:], packed, None), together[-rows:])


def test_a_damaged_row_stays_alone(kernels: CpuKernels) -> None:
    x = _random(20, 64)
    x[3] = float("nan")
    for variant in kernels.variants():
        result = variant.linear(x, variant.pack(_random(32, 64).bfloat16()), None)
        assert result.isnan().any(dim=1).tolist() == [row == 3 for row in range(20)]


@pytest.mark.parametrize("size", [8, 24, 21])
def test_gated_silu(kernels: CpuKernels, size: int) -> None:
    x = torch.cat([torch.linspace(-200.0, 200.0, 5 * size).view(5, size), _random(5, size)], dim=1)
    expected = functional.silu(x[:, :size]) * x[:, size:]
    torch.testing.assert_close(kernels.gated_silu(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("has_norms", [False, True], ids=["", "norms"])
def test_rotation_and_storing(kernels: CpuKernels, *, has_norms: bool) -> None:
    heads, kv_heads, dim, tokens = 3, 2, 16, 5
    qkv = _random(tokens, (heads + 2 * kv_heads) * dim)
    cos, sin = _random(2, tokens, dim, seed=1)
    q_norm, k_norm = _random(2, dim, seed=2) if has_norms else (None, None)
    keys, values = torch.zeros(2, 4, 4, kv_heads, dim)
    slots = torch.tensor([9, 2, 15, 0, 4])
    queries = kernels.rotate_and_store(
        qkv, cos, sin, keys, values, slots, q_norm=q_norm, k_norm=k_norm, epsilon=1e-6
    )
    heads_of_all = qkv.view(tokens, -1, dim)
    q, k, v = heads_of_all[:, :heads], heads_of_all[:, heads:-kv_heads], heads_of_all[:, -kv_heads:]

    def rotate(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = functional.rms_norm(x, (dim,), norm, 1e-6)
        first, second = x.chunk(2, dim=-1)
        rotated: Tensor = x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
        return rotated

    torch.testing.assert_close(queries, rotate(q, q_norm))
    torch.testing.assert_close(keys.flatten(0, 1)[slots], rotate(k, k_norm))
    torch.testing.assert_close(values.flatten(0, 1)[slots], v)
    untouched = [slot for slot in range(16) if slot not in slots.tolist()]
    assert not keys.flatten(0, 1)[untouched].any()
    assert not values.flatten(0, 1)[untouched].any()
