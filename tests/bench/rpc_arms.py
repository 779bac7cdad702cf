"""The real server process, and clients that stream from it in another: what gRPC adds to the engine.

Run as a script, this module is the client process: one channel and one streaming call for each prompt.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from arms import Run
from models import Pair
from workload import Workload

START_SECONDS = 300.0


class RpcArm:
    """Speculation off, as its counterpart: the ratio shall not depend on drafts."""

    name = "draftline off, gRPC"

    def __init__(
        self, pair: Pair, directory: Path, *, dtype: str, max_streams: int, context_length: int
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        config = _make_config(pair, dtype=dtype, max_streams=max_streams, context_length=context_length)
        config_file = directory / "rpc-server.yaml"
        config_file.write_text(yaml.safe_dump(config))
        self._log_path = directory / "rpc-server.log"
        self._log = self._log_path.open("w")
        command = [sys.executable, "-m", "draftline_server", "serve", "--config", str(config_file)]
        self._server = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        address = f"127.0.0.1:{self._wait_for_port()}"
        self._client = subprocess.Popen(
            [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def supports(self, workload: Workload) -> bool:
        return True

    def run(self, workload: Workload) -> Run:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        message = {"prompts": workload.prompts, "max_new_tokens": workload.new_tokens}
        self._client.stdin.write(json.dumps(message) + "\n")
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        if not line:
            raise RuntimeError(f"the gRPC client ended with {self._client.wait()}; see {self._log_path}")
        answer = json.loads(line)
        return Run(answer["seconds"], tuple(map(tuple, answer["outputs"])))

    def close(self) -> None:
        assert self._client.stdin is not None
        self._client.stdin.close()
        self._client.wait(timeout=30)
        self._server.terminate()
        self._server.wait(timeout=60)
        self._log.close()

    def _wait_for_port(self) -> int:
        """The port that the server took, once it says that it serves."""
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up:
            if self._server.poll() is not None:
                raise RuntimeError(f"the server ended with {self._server.returncode}; see {self._log_path}")
            for entry in map(_parse, self._log_path.read_text().splitlines()):
                if entry.get("message") == "server ready":
                    return int(entry["grpc_port"])
            time.sleep(0.2)
        raise RuntimeError(f"the server did not become ready; see {self._log_path}")


def _parse(line: str) -> dict[str, Any]:
    """A log line; empty for what is none, or not yet complete."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _make_config(pair: Pair, *, dtype: str, max_streams: int, context_length: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "server": {
            "host": "127.0.0.1",
            "grpc_port": 0,
            "admin_port": 0,
            "max_concurrent_requests": max_streams,
            "lame_duck_seconds": 0,
        },
        "models": {"target_model": {"path": str(pair.target), "dtype": dtype}},
        "inference": {"max_context_length": context_length, "prefix_caching": False},
        "speculative_decoding": {"enabled": False},
    }


async def _stream(stub: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    from draftline.v1 import inference_pb2

    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True),
    )
    tokens: list[int] = []
    async for message in stub.GenerateStream(request, wait_for_ready=True):
        tokens.extend(message.chunk.token_ids)
    return tokens


async def _serve_client(address: str) -> None:
    """Answers workloads from stdin, like a peer's driver."""
    import grpc

    from draftline.v1 import inference_pb2_grpc

    for line in sys.stdin:
        workload = json.loads(line)
        # A subchannel pool of its own gives each channel its own connection, as separate clients have.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in workload["prompts"]]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        started = time.perf_counter()
        outputs = await asyncio.gather(
            *(
                _stream(stub, prompt, workload["max_new_tokens"])
                for stub, prompt in zip(stubs, workload["prompts"], strict=True)
            )
        )
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "outputs": outputs}), flush=True)
        await asyncio.gather(*(channel.close() for channel in channels))


if __name__ == "__main__":
    asyncio.run(_serve_client(sys.argv[1]))
