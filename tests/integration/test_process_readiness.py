"""A server process that cannot serve never looks ready, and is over with an exit code that says so."""

from __future__ import annotations

import asyncio
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from safetensors.torch import load_file, save_file

from draftline_server.__main__ import EXIT_STARTUP
from support.processes import ServerProcess, server_process
from support.serving import HEALTH, read_to_end, text_request
from support.zoo import ModelZoo

pytestmark = pytest.mark.timeout(180)

PATIENCE_SECONDS = 1.0
"""Of a probe. Whoever has no answer by then takes it for a no."""
WEIGHTS = "model.safetensors"


async def signs_of_readiness(running: ServerProcess) -> tuple[bool, bool]:
    """What /readyz and the gRPC health service say."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, _ = await running.get("/readyz")
    except OSError:  # a timeout is one, too
        status = 0
    try:
        check = running.health_stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        health = (await check).status
    except grpc.aio.AioRpcError:
        health = HEALTH.UNKNOWN
    return status == 200, health == HEALTH.SERVING


async def test_a_stopped_process_looks_dead_and_goes_on_where_it_was(zoo: ModelZoo, tmp_path: Path) -> None:
    request = text_request("the clock in the hall", temperature=0.0, max_tokens=400, ignore_eos=True)
    async with server_process(tmp_path, target=zoo.target()) as running:
        await running.wait_for_log("server ready")
        expected = (await running.stub.Generate(request)).text
        assert await signs_of_readiness(running) == (True, True)

        stream = running.stub.GenerateStream(request)
        first: Any = await stream.read()
        running.process.send_signal(signal.SIGSTOP)
        assert await signs_of_readiness(running) == (False, False)

        running.process.send_signal(signal.SIGCONT)
        rest, summary = await read_to_end(stream)
        assert first.chunk.text + rest == expected
        assert summary.usage.completion_tokens == 400
        assert await signs_of_readiness(running) == (True, True)


def lose_the_weights(model: Path) -> None:
    (model / WEIGHTS).unlink()


def make_weights_no_numbers(model: Path) -> None:
    """Only the warm-up can see that: every file is as it should be."""
    tensors = load_file(model / WEIGHTS)
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("damage", [lose_the_weights, make_weights_no_numbers])
async def test_a_failed_load_is_never_ready_and_ends_the_process(
    zoo: ModelZoo, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    target = tmp_path / "target"
    shutil.copytree(zoo.target(), target)
    damage(target)
    async with server_process(tmp_path, target=target) as running:
        await running.wait_for_log("ports opened")
        looks: list[tuple[bool, bool]] = []
        while running.process.returncode is None:
            looks.append(await signs_of_readiness(running))
            await asyncio.sleep(0.02)
        assert running.process.returncode == EXIT_STARTUP
    assert set(looks) == {(False, False)}
    assert len(running.other_lines) == 1
    assert running.other_lines[0].startswith("error: models.target_model")
