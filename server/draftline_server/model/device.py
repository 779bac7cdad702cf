"""Where a model runs, in what dtype, and how much memory there is for it.

The one place that asks the machine; what follows from the answers is arithmetic (`memory_plan`). On a CPU
the memory is the container's own limit and never the host's: a pod that plans with the host's memory is
killed by the kernel.

float16 is refused on a CPU: most CPUs compute it through float32 at a fraction of the speed, and its
range makes activations overflow. bfloat16 is allowed on every CPU, where old ones compute it slowly.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from draftline_server.config import Dtype
from draftline_server.errors import ResourceError

DEVICE_KEY = "device"
ABSENT_GPU = torch.device("cuda")
"""A GPU that this machine need not have, for plans. Those that `resolve_device` returns have an index."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_CAPABILITY = (8, 0)
_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device has. `source` says where the number is from, for the log."""

    total_bytes: int
    available_bytes: int
    source: str


def resolve_device(requested: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to run on; auto is CUDA where there is one. Raises `ResourceError`."""
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        reason = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        raise ResourceError(f"{DEVICE_KEY}: cuda is asked for, but this installation of torch {reason}")
    return torch.device("cuda", 0) if has_cuda and requested != "cpu" else torch.device("cpu")


def resolve_dtype(requested: Dtype, *, checkpoint_dtype: str, device: torch.device, key: str) -> torch.dtype:
    """The dtype of weights and cache; auto is the checkpoint's. `key` is named where the device lacks it."""
    name = checkpoint_dtype if requested == "auto" else requested
    if name not in _DTYPES:
        raise ResourceError(f"{key}: the checkpoint has {name}; set one of {', '.join(_DTYPES)}")
    reason = _lacks(name, device)
    if reason:
        origin = " (the checkpoint's)" if requested == "auto" else ""
        raise ResourceError(f"{key}: {name}{origin} cannot be used: {reason}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype | str) -> str:
    """``torch.float32`` → ``"float32"``; a name is left as it is."""
    return str(dtype).removeprefix("torch.")


def read_memory(device: torch.device) -> DeviceMemory:
    """Asks the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free, torch.cuda.get_device_name(device))
    return read_container_memory()


def read_container_memory(proc_cgroup: Path = _PROC_CGROUP, cgroup_root: Path = _CGROUP_ROOT) -> DeviceMemory:
    """The lowest limit of the control groups that this process is in, else the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for file in _limit_files(proc_cgroup, cgroup_root) for limit in _read_limit(file)]
    limit = min(limits, default=physical)
    if limit < physical:
        return DeviceMemory(limit, limit, "the container's limit")
    return DeviceMemory(physical, physical, "the machine's memory")


def _lacks(name: str, device: torch.device) -> str | None:
    if device.type == "cpu":
        return "CPUs lack it; set float32 or bfloat16" if name == "float16" else None
    if device == ABSENT_GPU:
        return None
    if name == "bfloat16" and torch.cuda.get_device_capability(device) < _BFLOAT16_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} lacks it; set float16 or float32"
    return None


def _limit_files(proc_cgroup: Path, cgroup_root: Path) -> list[Path]:
    """The limit files of each memory group and all its parents, of cgroup v2 and v1.

    Inside a container the group's own path may not exist below the mount; the mount is then the group.
    """
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            root, name = cgroup_root, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroup_root / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = Path(group)
        files += [root / str(parent).lstrip("/") / name for parent in (path, *path.parents)]
    return files


def _read_limit(file: Path) -> list[int]:
    """No limit is "max" in v2 and a number above any memory in v1."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []
