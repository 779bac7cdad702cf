"""The methods of `draftline.v1.Inference`: convert, submit, stream. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from draftline.v1 import inference_pb2 as pb
from draftline.v1 import inference_pb2_grpc
from draftline_server import __version__
from draftline_server.config import Config
from draftline_server.core.generation import GenerationDelta, GenerationSummary
from draftline_server.frontend import Frontend
from draftline_server.rpc import convert
from draftline_server.rpc.calls import CallRecord, Calls
from draftline_server.rpc.health import ServingHealth
from draftline_server.rpc.interceptors import Context
from draftline_server.runner_thread import EngineThread, RequestStream

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name

# The engine ends a request at its deadline and says so. This is for an engine that does not come to it.
_DEADLINE_GRACE_SECONDS = 2.0


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves the API. Errors leave as exceptions; the interceptor turns them into codes."""

    def __init__(
        self,
        *,
        config: Config,
        frontend: Frontend,
        engine_thread: EngineThread,
        health: ServingHealth,
        calls: Calls,
    ) -> None:
        self._config = config
        self._frontend = frontend
        self._engine_thread = engine_thread
        self._health = health
        self._calls = calls

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        async with self._generation("Generate", request, context) as (record, stream):
            async for delta in stream:
                _count(record, delta)
                response.text += delta.text
                response.token_ids.extend(delta.token_ids)
                response.logprobs.extend(map(convert.logprobs_to_pb, delta.logprobs))
            response.summary.CopyFrom(convert.summary_to_pb(_summary_of(record), record.request_id))
        return response

    # The generated base class returns an async iterator here; gRPC takes a coroutine that writes as well,
    # and only that can be timed out while it waits for a slow client.
    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        async with self._generation("GenerateStream", request, context) as (record, stream):
            async for delta in stream:
                _count(record, delta)
                if delta.text or delta.token_ids:
                    await context.write(convert.chunk_to_pb(delta))
            summary = convert.summary_to_pb(_summary_of(record), record.request_id)
            await context.write(pb.GenerateStreamResponse(summary=summary))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._calls.record("Tokenize", context) as record:
            token_ids = await self._frontend.tokenize(convert.prompt_from_pb(request))
            record.num_prompt_tokens = len(token_ids)
            return pb.TokenizeResponse(token_ids=token_ids)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        async with self._calls.record("GetModelInfo", context, level=logging.DEBUG):
            pair = self._frontend.pair
            description = pair.description
            return pb.GetModelInfoResponse(
                target=convert.model_to_pb(description.target),
                draft=convert.model_to_pb(description.draft) if description.draft is not None else None,
                pair_digest=description.pair_digest,
                eos_token_ids=description.eos_token_ids,
                has_chat_template=pair.tokenizer.has_chat_template,
                max_context_length=pair.engine.limits.max_context_length,
            )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        async with self._calls.record("GetServerInfo", context, level=logging.DEBUG):
            pair = self._frontend.pair
            limits, statistics = pair.engine.limits, self._engine_thread.statistics
            return pb.GetServerInfoResponse(
                version=__version__,
                service_name=self._config.service_name,
                device=pair.description.device,
                draining=self._health.is_draining,
                requests_running=statistics.num_running,
                requests_waiting=statistics.num_waiting,
                max_concurrent_requests=self._config.max_running,
                max_queue_length=self._config.server.max_queue_length,
                max_tokens_per_request=limits.max_tokens_per_request,
                num_speculative_tokens=limits.num_speculative_tokens,
                speculation_methods=convert.methods_to_pb(limits.methods),
                speculation_active=statistics.speculation_active,
                kv_cache_capacity=statistics.kv_blocks_total * self._config.inference.block_size,
                kv_usage_ratio=statistics.kv_usage_ratio,
            )

    @asynccontextmanager
    async def _generation(
        self, method: str, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[tuple[CallRecord, RequestStream]]:
        """A submitted request; leaving early cancels it, time included that a slow client takes to read."""
        timing = self._frontend.start_timing(_client_seconds(context))
        async with self._calls.record(method, context, request_id=request.request_id) as record:
            limit = self._frontend.remaining_seconds(timing) + _DEADLINE_GRACE_SECONDS
            async with asyncio.timeout(limit):
                call = convert.call_from_pb(request, record.request_id)
                stream = await self._frontend.submit(call, timing)
                record.num_prompt_tokens = stream.num_prompt_tokens
                async with stream:
                    await self._calls.accept(record, context)
                    yield record, stream


def _client_seconds(context: Context) -> float | None:
    remaining: float | None = context.time_remaining()  # None without a deadline, whatever the stubs say
    return remaining


def _count(record: CallRecord, delta: GenerationDelta) -> None:
    record.num_output_tokens += len(delta.token_ids)
    record.summary = delta.summary


def _summary_of(record: CallRecord) -> GenerationSummary:
    assert record.summary is not None, "a stream ends with a summary or raises"
    return record.summary
