"""The server as it is run: a process, its files, its ports, its signals, with a real pair of models."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file

from draftline.v1 import inference_pb2 as pb
from draftline_server.app import EXIT_DRAINED
from support.processes import ServerProcess, server_process
from support.serving import failure_of, read_to_end, text_request
from support.zoo import ModelZoo

SECRET = "the clock in the hall struck nine"
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_k": 20, "logprobs": 2},
    {"temperature": 1.3, "seed": 2**64 - 1, "repetition_penalty": 1.2, "stop": ["e", "in"]},
    {"temperature": 0.0, "frequency_penalty": 0.7, "min_tokens": 9, "logit_bias": {7: 5.0}},
]
BLOCK_SIZE = 16
# The operator and the autoscaler read these.
METRICS = {
    "draftline_requests_running",
    "draftline_requests_waiting",
    'draftline_draft_tokens_total{proposer="draft_model"}',
    'draftline_accepted_tokens_total{proposer="draft_model"}',
    'draftline_accepted_tokens_per_position_total{position="0",proposer="draft_model"}',
    "draftline_speculation_active",
    "draftline_speculation_speedup",
    "draftline_kv_usage_ratio",
    "draftline_draining",
}
# Each is a histogram of seconds.
LATENCIES = (
    "draftline_request_queue_time_seconds",
    "draftline_time_to_first_token_seconds",
    "draftline_inter_token_latency_seconds",
    "draftline_request_time_per_output_token_seconds",
    "draftline_e2e_request_latency_seconds",
)


@pytest.mark.timeout(180)
async def test_process_serves_a_pair_and_drains_on_sigterm(zoo: ModelZoo, tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "server": {"max_concurrent_requests": 3, "max_queue_length": 4},
        "speculative_decoding": {"adaptive": False, "fallback_to_standard_decoding": False},
    }
    target, draft = zoo.target(), zoo.draft("noised")
    async with server_process(tmp_path, target=target, draft=draft, **sections) as running:
        await running.wait_for_log("ports opened")
        assert (await running.get("/healthz"))[0] == 200
        await running.wait_for_log("server ready")
        assert await running.get("/readyz") == (200, "ready\n")
        assert (await running.metrics()).keys() >= METRICS, "before anything was drafted, too"
        await assert_memory_plan_is_logged(running, target, draft)
        await assert_speculation_and_load_change_nothing(running)
        await assert_metrics(running)
        await assert_requests_are_logged(running)
        await assert_second_server_is_refused(running, target, tmp_path)
        await assert_everything_accepted_finishes(running)
        assert await running.process.wait() == EXIT_DRAINED
    assert running.other_lines == []
    assert SECRET not in str(running.log)
    finished = [line for line in running.log if line["message"] == "request finished"]
    assert {line["code"] for line in finished} == {"OK"}


async def assert_memory_plan_is_logged(running: ServerProcess, target: Path, draft: Path) -> None:
    plan = await running.wait_for_log("memory was planned")
    weights = [load_file(model / "model.safetensors").values() for model in (target, draft)]
    weight_bytes = [sum(tensor.nbytes for tensor in tensors) for tensors in weights]
    assert [plan["target_weight_bytes"], plan["draft_weight_bytes"]] == weight_bytes
    # Keys and values, of two layers, with two heads of 16 numbers of float32.
    kv_bytes = 2 * 2 * 2 * 16 * 4
    assert plan["target_kv_bytes_per_token"] == plan["draft_kv_bytes_per_token"] == kv_bytes
    assert plan["pool_tokens"] == BLOCK_SIZE * (await running.metrics())["draftline_kv_blocks"] > 0
    assert plan["pool_bytes"] == 2 * kv_bytes * plan["pool_tokens"] < plan["limit_bytes"]
    assert plan["level"] == "info"


async def assert_speculation_and_load_change_nothing(running: ServerProcess) -> None:
    alone = [await running.stub.Generate(ask(sampling, is_speculating=False)) for sampling in MIXED]
    together = await asyncio.gather(*(stream(running, ask(sampling)) for sampling in MIXED))
    for expected, (text, token_ids, summary) in zip(alone, together, strict=True):
        assert (text, token_ids) == (expected.text, list(expected.token_ids))
        assert summary.finish_reason == expected.summary.finish_reason
        assert summary.usage.completion_tokens == len(token_ids)
        counts = summary.speculation
        assert sum(counts.accepted_tokens_per_position) == counts.accepted_tokens <= counts.draft_tokens
    assert any(summary.speculation.accepted_tokens for _, _, summary in together)


async def assert_metrics(running: ServerProcess) -> None:
    metrics = await running.metrics()
    assert metrics.keys() >= METRICS
    assert any(name.startswith("draftline_model_info{") for name in metrics)
    accepted = sum(metrics[name] for name in metrics if name.startswith("draftline_accepted_tokens_total"))
    by_position = sum(metrics[name] for name in metrics if name.startswith("draftline_accepted_tokens_per"))
    assert 0 < accepted == by_position
    assert [name for name in LATENCIES if not metrics[f"{name}_count"]] == []
    assert metrics["draftline_kv_blocks_used"] == metrics["draftline_requests_running"] == 0


async def assert_requests_are_logged(running: ServerProcess) -> None:
    line = await running.wait_for_log("request finished")
    (model_info,) = [name for name in await running.metrics() if name.startswith("draftline_model_info{")]
    assert len(line["pair_digest"]) >= 8
    assert line["pair_digest"] in model_info
    assert line["request_id"]
    assert 0 <= line["queue_seconds"] <= line["time_to_first_token_seconds"] <= line["duration_seconds"]
    assert line["accepted_tokens"] <= line["draft_tokens"]


async def assert_second_server_is_refused(running: ServerProcess, target: Path, directory: Path) -> None:
    ports = {"grpc_port": running.ports["grpc_port"]}
    async with server_process(directory, target=target, server=ports) as second:
        assert await second.process.wait() == 2
    assert len(second.other_lines) == 1
    assert second.other_lines[0].startswith("error: server.grpc_port: cannot listen on ")


async def assert_everything_accepted_finishes(running: ServerProcess) -> None:
    requests = [text_request(f"{SECRET} {i}", max_tokens=500, ignore_eos=True) for i in range(4)]
    streams: list[Any] = []
    for request in requests[:3]:
        streams.append(running.stub.GenerateStream(request))
        assert (await streams[-1].read()).WhichOneof("message") == "chunk"
    streams.append(running.stub.GenerateStream(requests[3]))
    while (await running.metrics())["draftline_requests_waiting"] != 1:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.005)
    running.process.send_signal(signal.SIGTERM)
    await running.wait_for_log("draining began")
    running.process.send_signal(signal.SIGTERM)
    summaries = [(await read_to_end(stream))[1] for stream in streams]
    assert [summary.usage.completion_tokens for summary in summaries] == [500] * 4
    refused = await failure_of(running.stub.Generate(requests[0]))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    await running.wait_for_log("draining ended")
    # A supervisor may be impatient; there is nothing left that could be cut. Not `send_signal`: it looks for
    # the exit code, too, and would take it from whoever waits.
    while running.process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(running.process.pid, signal.SIGTERM)
        await asyncio.sleep(0.01)


def ask(sampling: dict[str, Any], *, is_speculating: bool = True) -> pb.GenerateRequest:
    request = text_request(SECRET, **{"max_tokens": 40, **sampling})
    request.speculation.enabled = is_speculating
    return request


async def stream(running: ServerProcess, request: pb.GenerateRequest) -> tuple[str, list[int], pb.Summary]:
    text = ""
    token_ids: list[int] = []
    async for message in running.stub.GenerateStream(request):
        if message.WhichOneof("message") == "summary":
            return text, token_ids, message.summary
        text += message.chunk.text
        token_ids += message.chunk.token_ids
    raise AssertionError("the stream ended without a summary")
