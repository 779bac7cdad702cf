"""Clients of serving pods, as a process in the cluster's network: a fixed number of streams at any time.

    python -m support.serving_clients TARGET --streams 8 --tokens 1000 [--rounds 1] PROMPT...

A stream that ends is followed by another one until the process gets SIGTERM; then those that run may end.
Prints a JSON line for each stream that has ended. A call that fails before its first message is `refused`:
clients may make it again. One that fails later is `cut`, which must not be.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import time
from collections.abc import Iterator

import grpc

from draftline.v1 import inference_pb2 as pb
from draftline.v1 import inference_pb2_grpc

# Several, as there would be several processes: their connections do not age together.
_CHANNELS = 4
_OPTIONS = [
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    ("grpc.use_local_subchannel_pool", 1),
]
_PAUSE_SECONDS = 0.2


async def stream(stub: inference_pb2_grpc.InferenceAsyncStub, prompt: str, tokens: int) -> dict[str, object]:
    """One call, as a record."""
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    call = stub.GenerateStream(pb.GenerateRequest(text=prompt, sampling=sampling))
    pieces: list[str] = []
    began, messages, is_complete, error = time.time(), 0, False, ""
    try:
        async for message in call:
            messages += 1
            if message.WhichOneof("message") == "summary":
                is_complete = True
            else:
                pieces.append(message.chunk.text)
    except grpc.aio.AioRpcError as failure:
        error = f"{failure.code().name}: {failure.details()}"
    outcome = "complete" if is_complete and not error else "cut" if messages else "refused"
    return {
        "prompt": prompt,
        "began": began,
        "seconds": time.time() - began,
        "outcome": outcome,
        "error": error,
        "text": "".join(pieces),
    }


class Clients:
    """Ends when it was told to and the streams that run have ended."""

    def __init__(self, target: str, tokens: int) -> None:
        self._channels = [grpc.aio.insecure_channel(target, options=_OPTIONS) for _ in range(_CHANNELS)]
        self._tokens = tokens
        self._is_ending = False

    def end(self) -> None:
        self._is_ending = True

    async def run(self, streams: int, prompts: list[str], rounds: int | None) -> None:
        given = itertools.cycle(prompts)
        stubs = itertools.cycle(inference_pb2_grpc.InferenceStub(channel) for channel in self._channels)
        runs = (self._one_after_another(next(stubs), given, rounds) for _ in range(streams))
        await asyncio.gather(*runs)

    async def _one_after_another(
        self, stub: inference_pb2_grpc.InferenceAsyncStub, prompts: Iterator[str], rounds: int | None
    ) -> None:
        done = 0
        while not self._is_ending and (rounds is None or done < rounds):
            record = await stream(stub, next(prompts), self._tokens)
            print(json.dumps(record), flush=True)
            if record["outcome"] == "refused":
                await asyncio.sleep(_PAUSE_SECONDS)
            done += 1


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("prompts", nargs="+")
    arguments = parser.parse_args()
    clients = Clients(arguments.target, arguments.tokens)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, clients.end)
    await clients.run(arguments.streams, arguments.prompts, arguments.rounds)


if __name__ == "__main__":
    asyncio.run(main())
