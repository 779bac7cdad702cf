"""Completions over gRPC: streams, identities, descriptions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftline.v1 import inference_pb2 as pb
from draftline_server import __version__
from draftline_server.testing import EOS_TOKEN_ID, ScriptedEngine
from support.serving import (
    SERVICE,
    RunningServer,
    details_of,
    failure_of,
    running_server,
    text_request,
    wait_for,
)


@pytest.fixture
async def serving() -> AsyncIterator[RunningServer]:
    async with running_server() as running:
        yield running


async def test_stream_and_unary_give_the_same(serving: RunningServer) -> None:
    request = text_request("zürich ", max_tokens=40, logprobs=2)
    unary = await serving.stub.Generate(request)
    messages = [message async for message in serving.stub.GenerateStream(request)]
    chunks = [m.chunk for m in messages[:-1]]
    assert all(m.WhichOneof("message") == "chunk" for m in messages[:-1])
    assert messages[-1].WhichOneof("message") == "summary"
    assert "".join(c.text for c in chunks) == unary.text == "zürich " * 5
    assert [i for c in chunks for i in c.token_ids] == list(unary.token_ids)
    assert [p for c in chunks for p in c.logprobs] == list(unary.logprobs)
    for summary in (messages[-1].summary, unary.summary):
        assert summary.finish_reason == pb.FINISH_REASON_LENGTH
        assert summary.usage == pb.Usage(prompt_tokens=8, completion_tokens=40)
        assert sum(summary.speculation.accepted_tokens_per_position) == summary.speculation.accepted_tokens
        assert 0 < summary.timings.time_to_first_token_ns <= summary.timings.end_to_end_ns


async def test_each_input_is_taken(serving: RunningServer) -> None:
    sampling = pb.SamplingParams(max_tokens=3)
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[65, 66]), sampling=sampling)
    assert (await serving.stub.Generate(ids)).text == "ABA"
    messages = [pb.ChatMessage(role="user", content="hi")]
    chat = pb.GenerateRequest(chat=pb.ChatMessages(messages=messages), sampling=sampling)
    assert (await serving.stub.Generate(chat)).text == "use"


async def test_end_token_is_named_in_the_summary() -> None:
    engine = ScriptedEngine(script=lambda request, index: EOS_TOKEN_ID if index == 4 else 97)
    async with running_server(engine) as serving:
        response = await serving.stub.Generate(text_request("x", max_tokens=40))
    assert response.text == "aaaa"
    assert response.summary.finish_reason == pb.FINISH_REASON_STOP
    assert response.summary.matched_stop_token_id == EOS_TOKEN_ID


@pytest.mark.parametrize("place", ["message", "metadata"])
async def test_request_id_comes_back(serving: RunningServer, place: str) -> None:
    request = text_request("x", max_tokens=2)
    metadata = (("x-request-id", "from metadata"),)
    if place == "message":
        request.request_id = "from message"
    call = serving.stub.Generate(request, metadata=metadata)
    response = await call
    assert response.summary.request_id == f"from {place}"
    assert dict(await call.initial_metadata())["x-request-id"] == f"from {place}"


async def test_request_id_is_made_where_the_client_has_none(serving: RunningServer) -> None:
    call = serving.stub.GenerateStream(text_request("x", max_tokens=2))
    messages = [message async for message in call]
    request_id = messages[-1].summary.request_id
    assert request_id
    assert dict(await call.initial_metadata())["x-request-id"] == request_id


async def test_two_requests_may_have_one_id(serving: RunningServer) -> None:
    serving.engine.hold()
    calls = []
    for text in ("one", "two"):
        request = text_request(text, max_tokens=6)
        request.request_id = "same"
        calls.append(serving.stub.Generate(request))
        await wait_for(lambda: serving.server.engine_thread.num_submitted == len(calls))
    serving.engine.resume()
    assert [(await call).text for call in calls] == ["oneone", "twotwo"]


async def test_request_ids_are_short_and_printable(serving: RunningServer) -> None:
    for request_id in ("x" * 129, "two\nlines", "\x1b[31m", "ü"):
        request = text_request("x", max_tokens=2)
        request.request_id = request_id
        error = await failure_of(serving.stub.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(error).startswith("request_id: ")
    metadata = (("x-request-id", "x" * 129),)
    error = await failure_of(serving.stub.Generate(text_request("x"), metadata=metadata))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tokenize_gives_what_generate_would_use(serving: RunningServer) -> None:
    response = await serving.stub.Tokenize(pb.TokenizeRequest(text="ab"))
    assert list(response.token_ids) == [97, 98]
    messages = [pb.ChatMessage(role="user", content="hi")]
    response = await serving.stub.Tokenize(pb.TokenizeRequest(chat=pb.ChatMessages(messages=messages)))
    assert bytes(response.token_ids) == b"user: hi\n"


async def test_model_and_server_are_described(serving: RunningServer) -> None:
    model = await serving.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert model.target.name == "scripted"
    assert not model.HasField("draft")
    assert model.pair_digest.startswith("sha256:")
    assert list(model.eos_token_ids) == [EOS_TOKEN_ID]
    assert model.has_chat_template
    assert model.max_context_length == 512
    server = await serving.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.version, server.service_name, server.device) == (__version__, "draftline", "cpu")
    assert (server.max_concurrent_requests, server.max_queue_length) == (4, 4)
    assert list(server.speculation_methods) == [pb.SPECULATION_METHOD_NGRAM]
    assert server.kv_cache_capacity == 64 * 16
    assert not server.draining


async def test_reflection_lists_the_services(serving: RunningServer) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(serving.channel)  # type: ignore[arg-type]
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert answers[1].file_descriptor_response.file_descriptor_proto
