"""Compiles and calls `cpu_kernels.c`: what torch does slowly on a CPU without bfloat16 instructions.

The library is built once with the system's C compiler (a second or two) and kept in the user's cache
directory under a key of its source. Without a compiler or without AVX2 nothing is lost but speed:
`load` returns None and torch's own operations do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_kernels.c")
_FLAGS = ("-O3", "-mavx2", "-mfma", "-fopenmp", "-fPIC", "-shared")
_TILE = 16
_MAX_HEAD_DIM = 256
_MAX_GROUP_SIZE = 32


class CpuKernels:
    """The compiled functions, for contiguous tensors on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._linears = {torch.bfloat16: library.linear_bf16, torch.float32: library.linear_f32}
        for function in self._linears.values():
            function.argtypes = [pointer, size, size, pointer, pointer, pointer, size]
            function.restype = None
        self._rms_norm = library.rms_norm_f32
        self._rms_norm.argtypes = [pointer] * 3 + [size] * 2 + [real]
        self._rms_norm.restype = None
        self._write = library.write_kv_f32
        self._write.argtypes = [pointer] * 3 + [size] * 5
        self._write.restype = None
        self._attention = library.paged_attention_f32
        self._attention.argtypes = [pointer] * 4 + [size] + [pointer] * 4 + [size] * 6 + [real] * 2
        self._attention.restype = None

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """``x [..., in]`` float32 by weights from `pack_weight`; returns ``[..., out_features]``."""
        x = x.contiguous()
        in_features = x.shape[-1]
        y = x.new_empty((*x.shape[:-1], out_features))
        self._linears[packed.dtype](
            x.data_ptr(),
            x.numel() // in_features,
            in_features,
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            out_features,
        )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalises the last dimension of float32 `x` and scales it by `weight`."""
        x = x.contiguous()
        y = torch.empty_like(x)
        dim = weight.shape[0]
        self._rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // dim, dim, epsilon)
        return y

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
        tables: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """``query [T, heads, dim]`` over one layer's pools ``[blocks, block_size, kv_heads, dim]``.

        `starts`, `query_lengths`, `kv_lengths` ``[S]`` and `tables` ``[S, blocks]`` are int32.
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


def pack_weight(weight: Tensor) -> Tensor:
    """``[out, in]`` in bfloat16 or float32, as `CpuKernels.linear` reads it: ``[tiles, in, 16]``."""
    missing = -weight.shape[0] % _TILE
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    tiles = padded.view(-1, _TILE, weight.shape[1]).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        # Features j and j + 8 side by side: the low and the high half of a 32-bit word.
        halves = tiles.reshape(*tiles.shape[:2], 2, _TILE // 2)
        tiles = halves.transpose(2, 3).flatten(2)
    return tiles.contiguous()


@cache
def load() -> CpuKernels | None:
    """The kernels, compiled if need be; None where this machine cannot have them."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    compiler = shutil.which(os.environ.get("CC", "cc"))
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    path = _cache_directory() / f"cpu_kernels-{key}.so"
    try:
        if not path.exists():
            if compiler is None:
                logger.warning("No C compiler found, running without the CPU kernels")
                return None
            _compile(compiler, path)
        return CpuKernels(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("The CPU kernels could not be built, running without them: %s", error)
        return None


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftline"


def _compile(compiler: str, path: Path) -> None:
    """Builds beside the destination and renames, so that nobody ever loads half a library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        subprocess.run(
            [compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"],
            check=True,
            capture_output=True,
            timeout=120,
        )
        built.rename(path)
