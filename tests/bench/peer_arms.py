"""Peers in processes of their own, driven line by line, so that their runs alternate with ours."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arms import Dtype, Run
from workload import Workload

PEERS = Path(__file__).resolve().parent / "peers"


class PeerArm:
    """A driver process of `peers/`. The time is taken inside of it."""

    def __init__(self, plan: _Plan, log: Path) -> None:
        self.name = plan.name
        self._plan = plan
        self._log = log.open("w")
        self._process = subprocess.Popen(
            plan.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**_environment(), **plan.environment},
        )
        self.description: str = self._receive()["ready"]

    def supports(self, workload: Workload) -> bool:
        if self._plan.copy_only and not workload.name.startswith("copy"):
            return False
        return workload.num_streams <= self._plan.max_streams

    def run(self, workload: Workload) -> Run:
        assert self._process.stdin is not None
        message = {"prompts": workload.prompts, "max_new_tokens": workload.new_tokens}
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = self._receive()
        return Run(answer["seconds"], tuple(map(tuple, answer["outputs"])))

    def close(self) -> None:
        """Closing its input ends a driver."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environment() -> dict[str, str]:
    """Ours, less how our own threads wait: peers wait as they come."""
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


@dataclass(frozen=True)
class _Plan:
    """A peer that is to be started."""

    name: str
    command: list[str]
    max_streams: int
    environment: dict[str, str] = field(default_factory=dict)
    copy_only: bool = False


@dataclass(frozen=True)
class PeerSettings:
    """What all peers are started with."""

    model: Path
    dtypes: Sequence[Dtype]
    max_streams: int
    num_speculative_tokens: int
    threads: int
    logs: Path


def start_transformers(settings: PeerSettings) -> list[PeerArm]:
    """What every run compares with."""
    return [_start(plan, settings) for plan in _plan_transformers(settings)]


def start_peers(settings: PeerSettings) -> list[PeerArm]:
    """Installs what is missing and starts every other peer that runs here; says which ones do not."""
    sys.path.insert(0, str(PEERS))
    started: list[PeerArm] = []
    for make_plans in (_plan_vllm, _plan_llama_cpp):
        try:
            started += [_start(plan, settings) for plan in make_plans(settings)]
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"left out: {error}", file=sys.stderr)
    return started


def _start(plan: _Plan, settings: PeerSettings) -> PeerArm:
    settings.logs.mkdir(parents=True, exist_ok=True)
    log = re.sub(r"[^a-z0-9.]+", "-", plan.name.lower())
    return PeerArm(plan, settings.logs / f"peer-{log}.log")


def _plan_transformers(settings: PeerSettings) -> Iterator[_Plan]:
    """`generate` in each dtype, and prompt lookup in the last."""

    def plan(name: str, dtype: Dtype, max_streams: int, *options: str) -> _Plan:
        command = [sys.executable, str(PEERS / "drive_transformers.py"), "--model", str(settings.model)]
        command += ["--dtype", dtype.name, "--threads", str(settings.threads), *options]
        return _Plan(f"transformers {name}, {dtype.name}", command, max_streams)

    for dtype in settings.dtypes:
        yield plan("generate", dtype, dtype.limit_streams(settings.max_streams))
    lookup = ("--num-lookup-tokens", str(settings.num_speculative_tokens))
    yield plan("prompt lookup", settings.dtypes[-1], 1, *lookup)


def _plan_vllm(settings: PeerSettings) -> Iterator[_Plan]:
    """Plain in each dtype, and n-gram in the last."""
    import install_vllm

    python = install_vllm.install()
    # As its manual advises for CPUs; the library comes with its requirements.
    environment = {"LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so")}

    def plan(name: str, dtype: Dtype, max_streams: int, *options: str, copy_only: bool = False) -> _Plan:
        command = [str(python), str(PEERS / "drive_vllm.py"), "--model", str(settings.model)]
        command += ["--dtype", dtype.name, "--max-streams", str(max_streams), *options]
        return _Plan(f"{name}, {dtype.name}", command, max_streams, environment, copy_only)

    for dtype in settings.dtypes:
        yield plan("vLLM", dtype, dtype.limit_streams(settings.max_streams))
    speculate = ("--num-speculative-tokens", str(settings.num_speculative_tokens))
    yield plan("vLLM n-gram", settings.dtypes[-1], 1, *speculate, copy_only=True)


def _plan_llama_cpp(settings: PeerSettings) -> Iterator[_Plan]:
    """In bfloat16 alone, which it computes well on any processor."""
    import install_llama_cpp

    server, gguf = install_llama_cpp.install(), install_llama_cpp.convert(settings.model)

    def plan(name: str, max_streams: int, *options: str, copy_only: bool = False) -> _Plan:
        command = [sys.executable, str(PEERS / "drive_llama_cpp.py"), "--binary", str(server)]
        command += ["--model", str(gguf), "--max-streams", str(max_streams), *options]
        return _Plan(f"{name}, bfloat16", command, max_streams, copy_only=copy_only)

    yield plan("llama.cpp", settings.max_streams)
    speculate = ("--num-speculative-tokens", str(settings.num_speculative_tokens))
    yield plan("llama.cpp n-gram", 1, *speculate, copy_only=True)
