"""What gRPC costs: the engine alone in one process, the engine behind gRPC in another, clients in a third.

Run as a script, this module is one of those processes. Both engines are loaded the same way and with the
same threads, speculation off: what is compared shall not depend on drafts. Needs Linux, for the CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from arms import Run
from models import Pair
from workload import Workload

START_SECONDS = 300.0
ENGINE_THREADS = "engine"


@dataclass(frozen=True)
class RpcRun(Run):
    """With the CPU time that serving took, and that of the clients, who have no cores of their own here."""

    server_cpu_seconds: float = 0.0
    """All threads of the server but the engine's and the pool's."""
    client_cpu_seconds: float = 0.0


@dataclass(frozen=True)
class RpcSettings:
    """What both engines are loaded with."""

    pair: Pair
    dtype: str
    max_streams: int
    context_length: int
    threads: int

    def command(self, role: str) -> list[str]:
        return [sys.executable, __file__, role, json.dumps(self._config())]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": str(self.threads)}

    def _config(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "server": {
                "host": "127.0.0.1",
                "grpc_port": 0,
                "admin_port": 0,
                "max_concurrent_requests": self.max_streams,
                "lame_duck_seconds": 0,
            },
            "models": {"target_model": {"path": str(self.pair.target), "dtype": self.dtype}},
            "inference": {"max_context_length": self.context_length, "prefix_caching": False},
            "speculative_decoding": {"enabled": False},
        }


class AloneArm:
    """The engine alone: one `step` after the other."""

    name = "draftline off, alone"

    def __init__(self, settings: RpcSettings) -> None:
        self._process = _Driven(settings.command("alone"), settings.environment())

    def supports(self, workload: Workload) -> bool:
        return True

    def run(self, workload: Workload) -> Run:
        answer = self._process.run(workload)
        return Run(answer["seconds"], _outputs(answer))

    def close(self) -> None:
        self._process.close()


class RpcArm:
    """The server, and clients that stream from it: a connection for each."""

    name = "draftline off, gRPC"

    def __init__(self, settings: RpcSettings, log: Path) -> None:
        self._log = log.open("w")
        self._server = subprocess.Popen(
            settings.command("server"),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=settings.environment(),
        )
        address = f"127.0.0.1:{self._wait_for_port()}"
        self._clients = _Driven([sys.executable, __file__, "clients", address], settings.environment())

    def supports(self, workload: Workload) -> bool:
        return True

    def run(self, workload: Workload) -> RpcRun:
        server_before, clients_before = self._cpu_seconds()
        answer = self._clients.run(workload)
        server, clients = self._cpu_seconds()
        return RpcRun(
            answer["seconds"],
            _outputs(answer),
            server_cpu_seconds=server - server_before,
            client_cpu_seconds=clients - clients_before,
        )

    def close(self) -> None:
        self._clients.close()
        self._server.terminate()
        self._server.wait(timeout=60)
        self._log.close()

    def _cpu_seconds(self) -> tuple[float, float]:
        server = process_cpu_seconds(self._server.pid)
        engine = thread_cpu_seconds(self._server.pid, ENGINE_THREADS)
        return server - engine, process_cpu_seconds(self._clients.pid)

    def _wait_for_port(self) -> int:
        """The port that the server took, once it says that it serves."""
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up:
            if self._server.poll() is not None:
                raise RuntimeError(f"the server ended with {self._server.returncode}; see {self._log.name}")
            for entry in map(_parse, Path(self._log.name).read_text().splitlines()):
                if entry.get("message") == "server ready":
                    return int(entry["grpc_port"])
            time.sleep(0.2)
        raise RuntimeError(f"the server did not become ready; see {self._log.name}")


class _Driven:
    """A process that carries out workloads line by line."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._process.pid

    def run(self, workload: Workload) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        message = {"prompts": workload.prompts, "max_new_tokens": workload.new_tokens}
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def process_cpu_seconds(pid: int) -> float:
    """What a process has used, with the threads that have ended."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it, which Python lacks


def thread_cpu_seconds(pid: int, name: str) -> float:
    """What the threads of one name have used."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread, that has just ended
            if (task / "comm").read_text().strip() == name:
                total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


def _outputs(answer: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, answer["outputs"]))


def _parse(line: str) -> dict[str, Any]:
    """A log line; empty for what is none, or not yet complete."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


# ------------------------------------------------------------------------------------------- the processes


def _workloads() -> Iterator[Workload]:
    for line in sys.stdin:
        message = json.loads(line)
        yield Workload("rpc", tuple(map(tuple, message["prompts"])), message["max_new_tokens"])


def _answer(run: Run) -> None:
    print(json.dumps({"seconds": run.seconds, "outputs": run.outputs}), flush=True)


def run_alone(config: str) -> None:
    from draftline_server.app import load_pair
    from draftline_server.config import parse_config
    from draftline_server.engine import Engine
    from engine_arms import EngineArm

    engine = load_pair(parse_config(json.loads(config))).engine
    engine.warm_up()
    arm = EngineArm(AloneArm.name, cast(Engine, engine))
    for workload in _workloads():
        _answer(arm.run(workload))


def run_server(config: str) -> int:
    from draftline_server.app import load_pair, run
    from draftline_server.config import Config, parse_config
    from draftline_server.core.served_pair import ServedPair
    from draftline_server.log import configure_logging

    def load(parsed: Config) -> ServedPair:
        # This is the engine's thread; those of OpenMP, which it starts, inherit its name.
        Path("/proc/thread-self/comm").write_text(ENGINE_THREADS)
        return load_pair(parsed)

    configure_logging(level="info", log_format="json")
    return run(parse_config(json.loads(config)), load)


async def run_clients(address: str) -> None:
    import grpc

    from draftline.v1 import inference_pb2_grpc

    for workload in _workloads():
        # A subchannel pool of its own gives each channel its own connection, as separate clients have.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in workload.prompts]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        started = time.perf_counter()
        outputs = await asyncio.gather(
            *(
                _stream(stub, prompt, workload.new_tokens)
                for stub, prompt in zip(stubs, workload.prompts, strict=True)
            )
        )
        _answer(Run(time.perf_counter() - started, tuple(outputs)))
        await asyncio.gather(*(channel.close() for channel in channels))


async def _stream(stub: Any, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
    from draftline.v1 import inference_pb2

    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True),
    )
    tokens: list[int] = []
    async for message in stub.GenerateStream(request, wait_for_ready=True):
        tokens.extend(message.chunk.token_ids)
    return tuple(tokens)


def _main(role: str, argument: str) -> int:
    match role:
        case "alone":
            run_alone(argument)
        case "clients":
            asyncio.run(run_clients(argument))
        case "server":
            return run_server(argument)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
