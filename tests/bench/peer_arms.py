"""Peers in processes of their own, driven line by line, so that their runs alternate with ours."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from arms import Run
from workload import Workload

PEERS = Path(__file__).resolve().parent / "peers"


class PeerArm:
    """A driver process of `peers/`. The time is taken inside of it."""

    def __init__(self, name: str, command: list[str], log: Path, *, copy_only: bool = False) -> None:
        self.name = name
        self._copy_only = copy_only
        self._log = log.open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.description: str = self._receive()["ready"]

    def supports(self, workload: Workload) -> bool:
        return not self._copy_only or workload.name.startswith("copy")

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


def start_peers(model: Path, logs: Path, *, max_streams: int, num_speculative_tokens: int) -> list[PeerArm]:
    """Installs what is missing and starts every peer that runs here; says which ones do not."""
    sys.path.insert(0, str(PEERS))
    import install_llama_cpp
    import install_vllm

    def vllm(*options: str) -> list[str]:
        return [str(install_vllm.install()), str(PEERS / "drive_vllm.py"), "--model", str(model), *options]

    def llama_cpp(*options: str) -> list[str]:
        server, gguf = install_llama_cpp.install(), install_llama_cpp.convert(model)
        driver = [sys.executable, str(PEERS / "drive_llama_cpp.py")]
        return [*driver, "--binary", str(server), "--model", str(gguf), *options]

    streams = ("--max-streams", str(max_streams))
    speculate = ("--max-streams", "1", "--num-speculative-tokens", str(num_speculative_tokens))
    wanted = [
        ("vLLM", vllm, streams, False),
        ("vLLM n-gram", vllm, speculate, True),
        ("llama.cpp", llama_cpp, streams, False),
        ("llama.cpp n-gram", llama_cpp, speculate, True),
    ]
    logs.mkdir(parents=True, exist_ok=True)
    started = []
    for name, command, options, copy_only in wanted:
        log = logs / f"peer-{name.replace(' ', '-')}.log"
        try:
            started.append(PeerArm(name, command(*options), log, copy_only=copy_only))
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    return started
