"""Seats and queue, deadlines and cancellation: everything ends, nothing leaks."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from draftline.v1 import inference_pb2_grpc
from draftline_server.rpc.servicer import SERVICE_NAME
from draftline_server.testing import ScriptedEngine
from support.serving import (
    RunningServer,
    details_of,
    failure_of,
    make_config,
    read_to_end,
    running_server,
    text_request,
    wait_for,
)


@pytest.fixture
async def serving() -> AsyncIterator[RunningServer]:
    async with running_server() as running:
        yield running


async def hold_with(serving: RunningServer, *, num_requests: int) -> list[Any]:
    """Accepts requests of an engine that does not step."""
    serving.engine.hold()
    calls = []
    for index in range(num_requests):
        calls.append(serving.stub.Generate(text_request(f"{index} ", max_tokens=12)))
        await wait_for(lambda: serving.server.engine_thread.num_submitted == len(calls))
    return calls


def pushback_of(error: grpc.aio.AioRpcError) -> str:
    return str(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])


async def test_seats_and_queue_are_filled_and_no_more(serving: RunningServer) -> None:
    calls = await hold_with(serving, num_requests=8)
    for call in (serving.stub.Generate, serving.stub.GenerateStream):
        error = await failure_of(call(text_request("one too many")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert pushback_of(error) == "1000"
    assert "one too many" not in serving.tokenizer.encoded
    # A full queue is no reason to restart the server, nor to send it less than others.
    assert (await serving.get("/healthz"))[0] == 200
    assert (await serving.get("/readyz"))[0] == 200
    serving.engine.resume()
    texts = [(await call).text for call in calls]
    assert texts == [(f"{index} " * 6)[:12] for index in range(8)]
    await serving.wait_until_idle()


RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": SERVICE_NAME}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.01s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
            },
        }
    ]
}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_client_with_a_retry_policy_tries_again_when_it_is_worth_it(
    serving: RunningServer, method: str
) -> None:
    calls = await hold_with(serving, num_requests=8)
    options = [("grpc.service_config", json.dumps(RETRIES))]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.server.grpc_port}", options=options) as channel:
        call = getattr(inference_pb2_grpc.InferenceStub(channel), method)(text_request("late", max_tokens=2))
        trying = asyncio.ensure_future(read_to_end(call) if method == "GenerateStream" else call)
        refused = b'draftline_request_errors_total{code="RESOURCE_EXHAUSTED"} 1.0'
        await wait_for(lambda: refused in serving.server.metrics.render())
        serving.engine.resume()
        await asyncio.gather(*calls)
        await trying
    await serving.wait_until_idle()


async def test_a_refused_call_has_an_id_too(serving: RunningServer) -> None:
    calls = await hold_with(serving, num_requests=8)
    request = text_request("x")
    request.request_id = "one-too-many"
    error = await failure_of(serving.stub.Generate(request))
    assert dict(error.trailing_metadata())["x-request-id"] == "one-too-many"
    serving.engine.resume()
    await asyncio.gather(*calls)


async def test_burst_of_calls_is_refused_by_us_and_not_dropped_by_grpc(serving: RunningServer) -> None:
    calls = [serving.stub.Generate(text_request("x", max_tokens=1)) for _ in range(1500)]
    codes = Counter([await call.code() for call in calls])
    assert codes.keys() <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes[grpc.StatusCode.OK] >= 8
    await serving.wait_until_idle()


async def test_queue_of_length_zero_still_fills_the_seats() -> None:
    async with running_server(config=make_config(max_queue_length=0)) as serving:
        calls = await hold_with(serving, num_requests=4)
        error = await failure_of(serving.stub.Generate(text_request("x")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        serving.engine.resume()
        await asyncio.gather(*calls)


async def test_no_more_seats_are_filled_than_a_step_has_places() -> None:
    config = make_config(max_queue_length=2)
    inference = config.inference.model_copy(update={"max_batch_size": 1})
    config = config.model_copy(update={"inference": inference})
    async with running_server(ScriptedEngine(max_running=1), config=config) as serving:
        calls = await hold_with(serving, num_requests=3)
        error = await failure_of(serving.stub.Generate(text_request("x")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        serving.engine.resume()
        await asyncio.gather(*calls)


async def test_waiting_requests_are_counted_at_once(serving: RunningServer) -> None:
    calls = await hold_with(serving, num_requests=7)
    _, _, metrics = await serving.get("/metrics")
    assert "draftline_requests_waiting 7.0" in metrics
    serving.engine.release(2)  # the first step began before the other requests came
    await wait_for(lambda: serving.server.engine_thread.statistics.num_running == 4)
    _, _, metrics = await serving.get("/metrics")
    assert "draftline_requests_waiting 3.0" in metrics
    serving.engine.resume()
    await asyncio.gather(*calls)


async def test_client_deadline_ends_the_request(serving: RunningServer) -> None:
    serving.engine.hold()
    error = await failure_of(serving.stub.Generate(text_request("x"), timeout=0.1))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_for(lambda: serving.server.calls.num_open == 0)
    serving.engine.resume()
    await serving.wait_until_idle()
    _, _, metrics = await serving.get("/metrics")
    assert "draftline_request_timeouts_total 1.0" in metrics
    assert "draftline_request_aborts_total 0.0" in metrics


async def test_request_timeout_goes_before_a_longer_deadline() -> None:
    config = make_config(request_timeout_seconds=0.1)
    async with running_server(ScriptedEngine(script=lambda *_: 1), config=config) as serving:
        serving.engine.hold()
        call = serving.stub.GenerateStream(text_request("x", max_tokens=200), timeout=60)
        await asyncio.sleep(0.12)
        serving.engine.resume()
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        _, _, metrics = await serving.get("/metrics")
        assert "draftline_request_timeouts_total 1.0" in metrics
        await serving.wait_until_idle()


async def test_engine_that_does_not_come_to_a_deadline_holds_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline_server.rpc.servicer._DEADLINE_GRACE_SECONDS", 0.05)
    async with running_server(config=make_config(request_timeout_seconds=0.1)) as serving:
        serving.engine.hold()
        error = await failure_of(serving.stub.Generate(text_request("x")))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        serving.engine.resume()
        await serving.wait_until_idle()


async def test_waiting_too_long_is_a_timeout() -> None:
    config = make_config(queue_timeout_seconds=0.05)
    async with running_server(ScriptedEngine(max_running=1), config=config) as serving:
        serving.engine.hold()
        first = serving.stub.Generate(text_request("a", max_tokens=30))
        await wait_for(serving.engine.step_began.is_set)
        serving.engine.release()
        await wait_for(lambda: serving.server.engine_thread.statistics.num_running == 1)
        second = serving.stub.Generate(text_request("b", max_tokens=30))
        await wait_for(lambda: serving.server.engine_thread.num_submitted == 2)
        await asyncio.sleep(0.06)
        serving.engine.release(3)
        error = await failure_of(second)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "waited" in details_of(error)
        serving.engine.resume()
        assert len((await first).token_ids) == 30


@pytest.mark.parametrize("when", ["queued", "running"])
async def test_cancel_frees_everything_without_new_traffic(serving: RunningServer, when: str) -> None:
    calls = await hold_with(serving, num_requests=6)
    if when == "running":
        serving.engine.release(2)
        await wait_for(lambda: serving.server.engine_thread.statistics.num_running == 4)
    for call in calls:
        call.cancel()
    await wait_for(lambda: serving.server.calls.num_open == 0)
    serving.engine.resume()
    await serving.wait_until_idle()
    _, _, metrics = await serving.get("/metrics")
    assert "draftline_request_aborts_total 6.0" in metrics
    assert 'draftline_request_errors_total{code="CANCELLED"} 6.0' in metrics


async def test_storm_of_cancelled_and_expired_requests_leaves_nothing() -> None:
    async with running_server(config=make_config(max_queue_length=256)) as serving:

        async def leave_early(index: int) -> None:
            request = text_request("abcdefgh" * (1 + index % 5), max_tokens=200)
            if index % 3 == 0:
                await failure_of(serving.stub.Generate(request, timeout=0.001 * (index % 20)))
                return
            call = serving.stub.GenerateStream(request)
            for _ in range(index % 4):
                await call.read()
            call.cancel()

        tasks = [asyncio.create_task(leave_early(index)) for index in range(200)]
        await asyncio.gather(*tasks, return_exceptions=True)
        await serving.wait_until_idle()
        assert serving.server.engine_thread.statistics.kv_usage_ratio == 0.0
        assert (await serving.stub.Generate(text_request("ok", max_tokens=2))).text == "ok"


async def test_disconnect_cancels(serving: RunningServer) -> None:
    serving.engine.hold()
    async with grpc.aio.insecure_channel(serving.address) as channel:
        stream: Any = channel.unary_stream("/draftline.v1.Inference/GenerateStream")
        stream(text_request("x", max_tokens=200).SerializeToString())
        await wait_for(serving.engine.step_began.is_set)
    serving.engine.resume()
    await serving.wait_until_idle()


async def test_slow_reader_holds_up_nobody(serving: RunningServer) -> None:
    slow = serving.stub.GenerateStream(text_request("slow", max_tokens=200))
    await slow.read()
    assert (await serving.stub.Generate(text_request("fast", max_tokens=8))).text == "fastfast"
    await wait_for(lambda: serving.server.engine_thread.statistics.num_running == 0)
    _, summary = await read_to_end(slow)
    assert summary.usage.completion_tokens == 200
