"""What the machine is asked, with machines that are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from draftline_server.errors import ResourceError
from draftline_server.model import device

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize(
    ("proc", "files", "expected"),
    [
        pytest.param("0::/\n", {"memory.max": f"{64 * MIB}\n"}, 64 * MIB, id="v2-in-a-namespace"),
        pytest.param("0::/\n", {"memory.max": "max\n"}, None, id="v2-without-a-limit"),
        pytest.param(
            "0::/kubepods/pod1/c1\n",
            {"kubepods/pod1/c1/memory.max": "max", "kubepods/pod1/memory.max": f"{32 * MIB}"},
            32 * MIB,
            id="v2-limit-of-the-pod",
        ),
        pytest.param("0::/kubepods/c1\n", {"memory.max": f"{16 * MIB}"}, 16 * MIB, id="v2-path-of-the-host"),
        pytest.param(
            "5:cpu:/x\n4:memory:/docker/c1\n0::/\n",
            {"memory/docker/c1/memory.limit_in_bytes": f"{48 * MIB}"},
            48 * MIB,
            id="v1",
        ),
        pytest.param(
            "4:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None, id="v1-without-a-limit"
        ),
        pytest.param(None, {}, None, id="no-groups"),
    ],
)
def test_a_container_plans_with_its_own_limit(
    tmp_path: Path, proc: str | None, files: dict[str, str], expected: int | None
) -> None:
    proc_file, root = tmp_path / "proc", tmp_path / "cgroup"
    if proc is not None:
        proc_file.write_text(proc)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    memory = device.read_container_memory(proc_file, root)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.total_bytes == memory.available_bytes == (expected or physical)
    assert memory.source == ("the container's limit" if expected else "the machine's memory")


@pytest.mark.parametrize(
    ("requested", "checkpoint", "expected"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", torch.float32),
        ("float32", "float16", torch.float32),
        ("bfloat16", "float32", torch.bfloat16),
    ],
)
def test_auto_takes_the_dtype_of_the_checkpoint(
    requested: str, checkpoint: str, expected: torch.dtype
) -> None:
    dtype = device.resolve_dtype(requested, checkpoint_dtype=checkpoint, device=CPU, key="k")  # type: ignore[arg-type]
    assert dtype is expected


@pytest.mark.parametrize(
    ("requested", "checkpoint", "message"),
    [
        (
            "auto",
            "float16",
            "k: float16 (the checkpoint's) cannot be used: CPUs lack it; set float32 or bfloat16",
        ),
        ("float16", "float32", "k: float16 cannot be used: CPUs lack it; set float32 or bfloat16"),
        ("auto", "float64", "k: the checkpoint has float64; set one of float32, bfloat16, float16"),
    ],
)
def test_a_dtype_that_a_cpu_lacks_is_refused(requested: str, checkpoint: str, message: str) -> None:
    with pytest.raises(ResourceError) as caught:
        device.resolve_dtype(requested, checkpoint_dtype=checkpoint, device=CPU, key="k")  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_bfloat16_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    with pytest.raises(ResourceError, match="bfloat16 cannot be used: Old GPU lacks it; set float16"):
        device.resolve_dtype("bfloat16", checkpoint_dtype="float32", device=torch.device("cuda", 0), key="k")


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.resolve_device("auto") == device.resolve_device("cpu") == CPU
    with pytest.raises(ResourceError, match=r"^device: cuda is asked for, but"):
        device.resolve_device("cuda")


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.resolve_device("auto") == torch.device("cuda", 0)
    assert device.resolve_device("cpu") == CPU
