"""A storm of calls on a real pair in a process of its own, most of them cut off somewhere, leaves nothing."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftline.v1 import inference_pb2 as pb
from draftline_server.app import EXIT_DRAINED
from support.processes import ServerProcess, server_process
from support.serving import text_request
from support.zoo import ModelZoo

SECONDS = 0.015
"""Of each call, in whose sum all of them begin."""
CONTEXT = 128
GAUGES = (
    "draftline_requests_running",
    "draftline_requests_waiting",
    "draftline_kv_blocks_used",
    "draftline_kv_usage_ratio",
)
# Little memory and a small budget, so that there are queues, chunks and preemptions to leave in.
SECTIONS: dict[str, dict[str, Any]] = {
    "server": {"max_concurrent_requests": 8, "max_queue_length": 2000},
    "inference": {"max_context_length": CONTEXT, "max_batched_tokens": 48, "kv_cache_memory": "160KiB"},
    "speculative_decoding": {
        "num_speculative_tokens": 4,
        "adaptive": False,
        "fallback_to_standard_decoding": False,
    },
}


def random_request(source: random.Random) -> pb.GenerateRequest:
    prompt = f"{source.randrange(6)} little birds " * source.choice([1, 2, 5])
    return text_request(
        prompt,
        max_tokens=source.choice([1, 4, 20, 60]),
        ignore_eos=True,
        temperature=source.choice([0.0, 1.0]),
    )


async def make_call(running: ServerProcess, source: random.Random, *, seconds: float) -> None:
    """One call of any fate, within so many seconds; raises what it ends with."""
    request, moment = random_request(source), source.uniform(0.001, 0.3)
    await asyncio.sleep(source.uniform(0.0, seconds))
    match source.choice(["whole", "out of time", "cancelled", "left"]):
        case "whole":
            await running.stub.Generate(request)
        case "out of time":
            await running.stub.Generate(request, timeout=moment)
        case "cancelled":
            call = running.stub.Generate(request)
            await asyncio.sleep(moment)
            call.cancel()
        case "left":
            stream = running.stub.GenerateStream(request)
            for _ in range(source.choice([1, 3])):
                await stream.read()
            stream.cancel()


async def read_gauges(running: ServerProcess) -> dict[str, float]:
    metrics = await running.metrics()
    return {name: metrics[name] for name in GAUGES}


@pytest.mark.timeout(180)
# Of the larger one more than a thousand end before their time.
@pytest.mark.parametrize("num_calls", [400, pytest.param(1600, marks=pytest.mark.slow)])
async def test_calls_that_end_at_random_moments_leave_nothing(
    zoo: ModelZoo, tmp_path: Path, num_calls: int
) -> None:
    source = random.Random(44)
    # Fills the context, and with it most of the pool.
    probe = text_request("all of it", max_tokens=CONTEXT, temperature=0.0, ignore_eos=True)
    async with server_process(
        tmp_path, target=zoo.target(), draft=zoo.draft("noised"), **SECTIONS
    ) as running:
        await running.wait_for_log("server ready")
        before = await running.stub.Generate(probe)
        calls = [
            make_call(running, random.Random(source.random()), seconds=SECONDS * num_calls)
            for _ in range(num_calls)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        unexpected = [o for o in outcomes if o is not None and not isinstance(o, grpc.aio.AioRpcError)]
        assert unexpected == []
        async with asyncio.timeout(2):
            while any((await read_gauges(running)).values()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        metrics = await running.metrics()
        assert metrics["draftline_preemptions_total"] > 0
        after = await running.stub.Generate(probe)
        assert (after.text, list(after.token_ids)) == (before.text, list(before.token_ids))
        assert await read_gauges(running) == dict.fromkeys(GAUGES, 0.0)
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == EXIT_DRAINED
    codes = Counter(line["code"] for line in running.log if line["message"] == "request finished")
    assert codes.keys() == {"OK", "CANCELLED", "DEADLINE_EXCEEDED"}
    assert min(codes.values()) > num_calls / 20, codes
