"""Calls `cpu_kernels.c`: what torch does slowly on a CPU.

CPUs that multiply bfloat16 do so in `amx_linear.c` or `avx512_linear.c`, which round inputs to bfloat16.

Without a compiler or without AVX2 nothing is lost but speed: `load` returns None and torch's own
operations do the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from draftline_server.model import native_library

_TILE = 16
_BF16_DEPTH = 32
_MAX_HEAD_DIM = 256
_MAX_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight of a linear layer in the layout of the function that reads it."""

    data: Tensor
    out_features: int
    multiply: Any
    """The C function."""
    rounds_inputs: bool = False
    """Whether inputs become bfloat16 on their way in."""


class CpuKernels:
    """The compiled functions, for contiguous tensors on the CPU."""

    def __init__(self, library: ctypes.CDLL, bf16: ctypes.CDLL | None = None) -> None:
        """`bf16` is the library for inputs that are rounded to bfloat16, where this CPU is faster by it."""
        self._library = library
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._linears = {torch.bfloat16: library.linear_bf16, torch.float32: library.linear_f32}
        library.pool_set_threads(torch.get_num_threads())
        self._linear_bf16_inputs = None if bf16 is None else bf16.linear_bf16_inputs
        if bf16 is not None:
            bf16.use_pool(library.pool_run)
        for function in (*self._linears.values(), self._linear_bf16_inputs):
            if function is not None:
                function.argtypes = [pointer, size, size, pointer, pointer, pointer, size]
                function.restype = ctypes.c_int
        self._rms_norm = library.rms_norm_f32
        self._rms_norm.argtypes = [pointer] * 3 + [size] * 2 + [real]
        self._rms_norm.restype = None
        self._argmax = library.argmax_f32
        self._argmax.argtypes = [pointer] * 2 + [size] * 2
        self._argmax.restype = None
        self._gated_silu = library.gated_silu_f32
        self._gated_silu.argtypes = [pointer] * 2 + [size] * 2
        self._gated_silu.restype = None
        self._rotate = library.rotate_and_store_f32
        self._rotate.argtypes = [pointer] * 5 + [real] + [pointer] * 4 + [size] * 4
        self._rotate.restype = None
        self._write = library.write_kv_f32
        self._write.argtypes = [pointer] * 3 + [size] * 5
        self._write.restype = None
        self._attention = library.paged_attention_f32
        self._attention.argtypes = [pointer] * 4 + [size] + [pointer] * 5 + [size] * 6 + [real] * 2
        self._attention.restype = None

    def variants(self) -> list[CpuKernels]:
        """The same in all ways that this CPU has, the fastest first and that of AVX2 last; for tests."""
        return [CpuKernels(self._library, bf16) for bf16 in (*_usable_bf16_libraries(self._library), None)]

    def pack(self, weight: Tensor) -> PackedWeight:
        """``[out, in]`` in bfloat16 or float32, for `linear`."""
        if weight.dtype == torch.bfloat16 and self._linear_bf16_inputs is not None:
            return PackedWeight(
                _pack_in_pairs(weight), weight.shape[0], self._linear_bf16_inputs, rounds_inputs=True
            )
        return PackedWeight(_pack_for_avx2(weight), weight.shape[0], self._linears[weight.dtype])

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """``x [..., in]`` float32 by a packed weight; returns ``[..., out]``."""
        x = x.contiguous()
        in_features = x.shape[-1]
        y = x.new_empty((*x.shape[:-1], weight.out_features))
        status = weight.multiply(
            x.data_ptr(),
            x.numel() // in_features,
            in_features,
            weight.data.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            weight.out_features,
        )
        if status != 0:
            raise MemoryError("no memory for the inputs of a linear layer")
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalises the last dimension of float32 `x` and scales it by `weight`."""
        x = x.contiguous()
        y = torch.empty_like(x)
        dim = weight.shape[0]
        self._rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // dim, dim, epsilon)
        return y

    def argmax(self, x: Tensor) -> Tensor:
        """The first index of the largest value of each row of contiguous float32 ``x [rows, n]``."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._argmax(x.data_ptr(), out.data_ptr(), *x.shape)
        return out

    def gated_silu(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of the halves of contiguous float32 ``x [..., 2 n]``; returns ``[..., n]``."""
        size = x.shape[-1] // 2
        y = x.new_empty((*x.shape[:-1], size))
        self._gated_silu(x.data_ptr(), y.data_ptr(), y.numel() // size, size)
        return y

    def rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        epsilon: float,
    ) -> Tensor:
        """Rotates queries and keys of contiguous ``qkv [T, (heads + 2 kv_heads) * dim]`` by their positions.

        `cos` and `sin` are ``[T, dim]``; the norms' weights ``[dim]`` apply to each head before. Keys and
        values go to ``slots [T]`` of one layer's pools ``[blocks, block_size, kv_heads, dim]``; the queries
        are returned, ``[T, heads, dim]``.
        """
        num_kv_heads, dim = keys.shape[-2:]
        num_tokens = qkv.shape[0]
        num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
        q = qkv.new_empty((num_tokens, num_heads, dim))
        self._rotate(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            epsilon,
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            slots.data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            dim,
        )
        return q

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Stores ``rows [kv_heads, tokens, dim]`` at ``slots [tokens]`` of one layer's pool."""
        num_heads, num_tokens, dim = rows.shape
        assert rows.stride(2) == 1, "a row must be contiguous"
        self._write(
            rows.data_ptr(),
            pool.data_ptr(),
            slots.data_ptr(),
            num_tokens,
            num_heads,
            dim,
            rows.stride(0),
            rows.stride(1),
        )

    def attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        starts: Tensor,
        query_lengths: Tensor,
        kv_lengths: Tensor,
        first_keys: Tensor,
        tables: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """``query [T, heads, dim]`` over one layer's pools ``[blocks, block_size, kv_heads, dim]``.

        `starts`, `query_lengths`, `kv_lengths`, `first_keys` ``[S]`` and `tables` ``[S, blocks]`` are int32.
        Rows of tokens that belong to no sequence are not written.
        """
        query = query.contiguous()
        out = torch.empty_like(query)
        _, block_size, num_kv_heads, head_dim = keys.shape
        self._attention(
            query.data_ptr(),
            out.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            starts.shape[0],
            starts.data_ptr(),
            query_lengths.data_ptr(),
            kv_lengths.data_ptr(),
            first_keys.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            query.shape[1],
            num_kv_heads,
            head_dim,
            block_size,
            window or 0,
            scaling,
            softcap or 0.0,
        )
        return out


def can_attend(*, head_dim: int, group_size: int) -> bool:
    """Whether the attention kernel has room for such heads; a group shares one key head."""
    return head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM and group_size <= _MAX_GROUP_SIZE


def _pack_for_avx2(weight: Tensor) -> Tensor:
    """``[tiles, in, 16]``."""
    missing = -weight.shape[0] % _TILE
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    tiles = padded.view(-1, _TILE, weight.shape[1]).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        # Features j and j + 8 side by side: the low and the high half of a 32-bit word.
        halves = tiles.reshape(*tiles.shape[:2], 2, _TILE // 2)
        tiles = halves.transpose(2, 3).flatten(2)
    return tiles.contiguous()


def _pack_in_pairs(weight: Tensor) -> Tensor:
    """``[tiles, steps, 16, 16, 2]``: by output, by 32 inputs; then inputs two by two."""
    out_features, in_features = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -in_features % _BF16_DEPTH, 0, -out_features % _TILE))
    tiles = padded.view(-1, _TILE, padded.shape[1] // _BF16_DEPTH, _BF16_DEPTH // 2, 2)
    return tiles.permute(0, 2, 3, 1, 4).contiguous()


@cache
def load() -> CpuKernels | None:
    """The kernels, compiled if need be; None where this machine cannot have them."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    library = native_library.load(native_library.CPU_KERNELS)
    if library is None:
        return None
    return CpuKernels(library, next(_usable_bf16_libraries(library), None))


def _usable_bf16_libraries(library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """Those that this CPU can run, the fastest first."""
    candidates = (
        (library.amx_is_usable, native_library.AMX_LINEAR),
        (library.avx512_bf16_is_usable, native_library.AVX512_LINEAR),
    )
    for is_usable, source in candidates:
        if is_usable() and (loaded := native_library.load(source)) is not None:
            yield loaded
