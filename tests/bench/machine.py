"""What this machine can do at best, measured in the same run: the floor that times are compared to."""

from __future__ import annotations

import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

_BUFFER_BYTES = 512 * 2**20
_REPEATS = 7


@dataclass(frozen=True)
class Machine:
    """Facts for the head of the table."""

    processor: str
    num_cores: int
    bytes_per_second: float
    """Sequential reads by all cores."""
    has_native_bfloat16: bool
    torch_version: str

    def floor_seconds(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_second


def measure_machine() -> Machine:
    return Machine(
        processor=_processor(),
        num_cores=os.cpu_count() or 1,
        bytes_per_second=_read_bandwidth(),
        has_native_bfloat16=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        torch_version=torch.__version__,
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _read_bandwidth() -> float:
    """The median over sums of a buffer that no cache holds."""
    buffer = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32)
    rates = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        buffer.sum()
        rates.append(_BUFFER_BYTES / (time.perf_counter() - started))
    return statistics.median(rates[1:])
