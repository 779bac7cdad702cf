"""Every way in which a call can fail, and that the next one does not."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from draftline.v1 import inference_pb2 as pb
from draftline_server import app
from draftline_server.core.admission import RequestLimits
from draftline_server.errors import InvalidRequestError
from draftline_server.log import JsonFormatter, TextFormatter
from draftline_server.testing import ByteTokenizer, ScriptedEngine
from support.serving import RunningServer, details_of, failure_of, make_config, running_server, text_request

UNKNOWN_METHOD: Any = 99
NAN, INFINITY = float("nan"), float("inf")
OUT_OF_RANGE: list[tuple[str, Any]] = [
    *((name, value)
      for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
                   "presence_penalty")
      for value in (NAN, INFINITY, -INFINITY)),
    ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("repetition_penalty", 0.0),
    ("top_k", -2), ("max_tokens", 0), ("max_tokens", -1), ("min_tokens", -1), ("logprobs", -1),
    ("logprobs", 21),
    ("stop", [""]), ("stop", ["", "x"]), ("stop", ["x"] * 1000), ("stop", ["x" * 100_000]),
    ("stop_token_ids", [257]), ("stop_token_ids", [-1]), ("logit_bias", {9999: 1.0}),
    ("logit_bias", {1: NAN}),
]  # fmt: skip
ACCEPTED: list[tuple[str, Any]] = [
    ("top_k", 0), ("top_k", -1), ("top_k", 257), ("top_k", 258), ("top_k", 9_999_999), ("top_k", 2**63 - 1),
    ("max_tokens", 512), ("max_tokens", 2**31 - 1), ("max_tokens", 2**63 - 1), ("seed", 2**64 - 1),
    ("stop", []), ("temperature", 0.0),
]  # fmt: skip


@pytest.fixture
async def serving() -> AsyncIterator[RunningServer]:
    async with running_server() as running:
        yield running


async def assert_serves(serving: RunningServer) -> None:
    """The shared assertions after every fault: nothing leaks, and another request is answered as ever."""
    async with asyncio.timeout(2):  # before anything else is sent, which might wake what sleeps
        await serving.wait_until_idle()
    assert (await serving.stub.Generate(text_request("ok ", max_tokens=6))).text == "ok ok "
    assert (await serving.get("/readyz"))[0] == 200


def assert_is_fault_of(error: grpc.aio.AioRpcError, field: str) -> None:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(error)
    assert details.startswith(field)
    assert not any(word in details for word in ("Traceback", "Error", "/", ".py"))


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=lambda v: str(v)[:20])
async def test_value_out_of_range_is_refused_by_name(serving: RunningServer, name: str, value: Any) -> None:
    for call in (serving.stub.Generate, serving.stub.GenerateStream):
        assert_is_fault_of(await failure_of(call(text_request("x", **{name: value}))), f"sampling.{name}")
    await assert_serves(serving)


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=lambda v: str(v)[:20])
async def test_edge_value_is_accepted(serving: RunningServer, name: str, value: Any) -> None:
    sampling = {"max_tokens": 5} | {name: value}
    response = await serving.stub.Generate(text_request("abc", **sampling))
    usage = response.summary.usage
    assert usage.completion_tokens >= 1
    assert usage.prompt_tokens + usage.completion_tokens <= 512
    await assert_serves(serving)


async def test_missing_max_tokens_means_the_servers_limit(serving: RunningServer) -> None:
    response = await serving.stub.Generate(text_request("abc"))
    assert response.summary.usage.completion_tokens == 256


def speculating(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", speculation=pb.SpeculationParams(**fields))


BAD_REQUESTS: list[tuple[str, pb.GenerateRequest]] = [
    ("input", pb.GenerateRequest()),
    ("text", pb.GenerateRequest(text="")),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds())),
    ("token_ids[1]", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 257]))),
    ("token_ids[0]", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1]))),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 512))),
    ("text", pb.GenerateRequest(text="x" * 512)),
    ("chat.messages", pb.GenerateRequest(chat=pb.ChatMessages())),
    ("speculation.max_draft_tokens", speculating(max_draft_tokens=6)),
    ("speculation.max_draft_tokens", speculating(max_draft_tokens=-1)),
    ("speculation.methods[0]", speculating(methods=[pb.SPECULATION_METHOD_DRAFT_MODEL])),
    ("speculation.methods[0]", speculating(methods=[pb.SPECULATION_METHOD_UNSPECIFIED])),
    ("speculation.methods[0]", speculating(methods=[UNKNOWN_METHOD])),
    ("sampling.min_tokens",
     pb.GenerateRequest(text="x", sampling=pb.SamplingParams(min_tokens=3, max_tokens=2))),
]  # fmt: skip


@pytest.mark.parametrize(("field", "request_"), BAD_REQUESTS, ids=lambda v: v if isinstance(v, str) else "")
async def test_bad_request_is_refused_by_field(
    serving: RunningServer, field: str, request_: pb.GenerateRequest
) -> None:
    assert_is_fault_of(await failure_of(serving.stub.Generate(request_)), field)
    await assert_serves(serving)


async def test_prompt_of_the_whole_context_but_one_fits(serving: RunningServer) -> None:
    response = await serving.stub.Generate(text_request("x" * 511))
    assert response.summary.usage == pb.Usage(prompt_tokens=511, completion_tokens=1)
    error = await failure_of(serving.stub.Generate(text_request("x" * 512)))
    assert "512 tokens" in details_of(error)
    assert "511" in details_of(error)
    await assert_serves(serving)


async def test_hopelessly_long_text_is_not_even_tokenized(serving: RunningServer) -> None:
    error = await failure_of(serving.stub.Generate(text_request("x" * 100_000)))
    assert_is_fault_of(error, "text")
    assert serving.tokenizer.encoded == []
    await assert_serves(serving)


async def test_truncation_is_said(serving: RunningServer) -> None:
    limits = RequestLimits(
        vocab_size=ByteTokenizer.vocab_size,
        max_context_length=32,
        max_tokens_per_request=8,
        context_overflow="truncate_left",
    )
    async with running_server(ScriptedEngine(limits=limits)) as truncating:
        response = await truncating.stub.Generate(text_request("x" * 100_000))
        await assert_serves(truncating)
    assert response.summary.num_truncated_prompt_tokens == 100_000 - 24
    assert response.summary.usage == pb.Usage(prompt_tokens=24, completion_tokens=8)


async def test_bytes_that_are_no_message_are_refused_logged_and_counted(
    serving: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for method in ("Generate", "Tokenize"):
            unary: Any = serving.channel.unary_unary(f"/draftline.v1.Inference/{method}")
            assert_is_fault_of(await failure_of(unary(b"\xff\xff\xff")), "(message)")
        stream: Any = serving.channel.unary_stream("/draftline.v1.Inference/GenerateStream")
        assert_is_fault_of(await failure_of(stream(b"\x12\x02\xff\xff")), "(message)")
        await serving.wait_until_idle()
    lines = [vars(r)["draftline_fields"] for r in caplog.records if r.getMessage() == "request finished"]
    assert [line["method"] for line in lines] == ["Generate", "Tokenize", "GenerateStream"]
    assert {line["code"] for line in lines} == {"INVALID_ARGUMENT"}
    _, _, metrics = await serving.get("/metrics")
    assert 'draftline_request_errors_total{code="INVALID_ARGUMENT"} 3.0' in metrics
    await assert_serves(serving)


async def test_unknown_method_is_unimplemented(serving: RunningServer) -> None:
    call: Any = serving.channel.unary_unary("/draftline.v1.Inference/Nothing")
    error = await failure_of(call(b""))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_oversize_message_is_refused() -> None:
    async with running_server(config=make_config(max_message_bytes=2048)) as serving:
        error = await failure_of(serving.stub.Generate(text_request("x" * 4096)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await assert_serves(serving)
        # What the server sends may be longer: it is bounded by its own max_tokens.
        response = await serving.stub.Generate(text_request("ab", max_tokens=256, logprobs=20))
        assert len(response.logprobs) == 256


async def test_fault_of_ours_shows_only_an_id(
    serving: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(text: str) -> list[int]:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"cannot read {text}") from error

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(serving.tokenizer, "encode", explode)
        for call in (serving.stub.Generate, serving.stub.GenerateStream):
            error = await failure_of(call(text_request("a prompt")))
            assert error.code() is grpc.StatusCode.INTERNAL
            words = details_of(error).split(" ")
            assert words[:2] == ["internal", "error"]
            logged = [
                r for r in caplog.records if vars(r).get("draftline_fields", {}).get("error_id") == words[2]
            ]
            assert len(logged) == 1
            for formatter in (JsonFormatter(), TextFormatter()):
                line = formatter.format(logged[0])
                assert all(word in line for word in ("ValueError", "in explode", "test_rpc_errors.py"))
        written = "".join(map(TextFormatter().format, caplog.records))
        assert "a prompt" not in written
    await assert_serves(serving)


def test_fault_that_no_call_gets_is_logged_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    def explode(text: str) -> None:
        raise ValueError(f"cannot read {text}")

    class Failing:
        async def run(self) -> int:
            asyncio.get_running_loop().call_soon(explode, "a prompt")
            await asyncio.sleep(0)
            return 0

    handler = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(app._run_to_the_end(Failing()))  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, handler)
    (line,) = map(TextFormatter().format, caplog.records)
    assert "in explode" in line
    assert "ValueError" in line
    assert "a prompt" not in line


async def test_answer_that_cannot_be_sent_is_internal(
    serving: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftline_server.rpc.convert.chunk_to_pb", lambda _: "no message")
    error = await failure_of(serving.stub.GenerateStream(text_request("prompt")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert details_of(error).startswith("internal error ")
    await serving.wait_until_idle()


async def test_logs_have_one_line_per_request_and_no_prompt(
    serving: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await serving.stub.Generate(text_request("a secret prompt", max_tokens=8))
        await failure_of(serving.stub.Generate(text_request("a secret prompt", top_p=2.0)))
        await serving.wait_until_idle()
    lines = [vars(r)["draftline_fields"] for r in caplog.records if r.getMessage() == "request finished"]
    assert [(line["code"], line["output_tokens"]) for line in lines] == [("OK", 8), ("INVALID_ARGUMENT", 0)]
    assert lines[0]["prompt_tokens"] == 15
    assert lines[0]["finish_reason"] == "length"
    assert 0 <= lines[0]["acceptance_rate"] <= 1
    assert "secret" not in str([r.__dict__ for r in caplog.records])


async def test_what_a_chat_template_says_of_a_message_goes_to_the_client_and_not_to_the_log(
    serving: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: ByteTokenizer, messages: list[tuple[str, str]]) -> list[int]:
        raise InvalidRequestError("chat.messages", f"cannot use {messages[0][1]!r}", quotes_input=True)

    monkeypatch.setattr(ByteTokenizer, "encode_chat", refuse)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a secret")])
    with caplog.at_level(logging.DEBUG):
        error = await failure_of(serving.stub.Generate(pb.GenerateRequest(chat=chat)))
        await serving.wait_until_idle()
    assert details_of(error) == "chat.messages: cannot use 'a secret'"
    (line,) = [vars(r)["draftline_fields"] for r in caplog.records if r.getMessage() == "request finished"]
    assert line["reason"].startswith("chat.messages: ")
    assert "secret" not in str([r.__dict__ for r in caplog.records])
