"""Around every method of the service: messages in and out, and errors to status codes.

Messages are parsed and serialized here and not by gRPC, which would answer a fault of either with an
exception's text. Where authentication comes one day, it becomes another interceptor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from draftline_server.errors import InvalidRequestError, RequestError
from draftline_server.rpc.status import as_request_error, status_of, trailing_metadata_of

Context = grpc.aio.ServicerContext[Any, Any]
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Behaviour = Callable[[Any, Context], Awaitable[Any]]
Parse = Callable[[bytes, Context], Awaitable[Message]]
Record = Callable[[str, Context], AbstractAsyncContextManager[object]]
"""Spans a call of the method with that name; see `Calls.record`."""


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call of one service with a code of ours; other services pass through."""

    def __init__(self, service: str, *, record: Record) -> None:
        """`record` is for calls that never reach their method, which records all others."""
        self._prefix = f"/{service}/"
        self._record = record

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Request, _Response] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Request, _Response] | None:
        method = await continuation(handler_call_details)
        if method is None or not handler_call_details.method.startswith(self._prefix):
            return method
        name = handler_call_details.method.removeprefix(self._prefix)
        parse = self._parser(name, method.request_deserializer)  # type: ignore[arg-type]
        if method.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _streaming(method.unary_stream, parse),  # type: ignore[arg-type]
                response_serializer=method.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _unary(method.unary_unary, parse)  # type: ignore[arg-type]
        )

    def _parser(self, name: str, deserialize: Callable[[bytes], Message]) -> Parse:
        async def parse(raw: bytes, context: Context) -> Message:
            try:
                return deserialize(raw)
            except DecodeError as error:
                async with self._record(name, context):
                    raise InvalidRequestError("(message)", "is not a valid message of this method") from error

        return parse


def _unary(behaviour: Behaviour, parse: Parse) -> Behaviour:
    async def respond(raw: bytes, context: Context) -> bytes:
        try:
            response: Message = await behaviour(await parse(raw, context), context)
            return response.SerializeToString()
        except Exception as error:
            await _abort(error, context)

    return respond


def _streaming(behaviour: Behaviour, parse: Parse) -> Behaviour:
    async def stream(raw: bytes, context: Context) -> None:
        try:
            await behaviour(await parse(raw, context), context)
        except Exception as error:
            await _abort(error, context)

    return stream


async def _abort(error: Exception, context: Context) -> NoReturn:
    if isinstance(error, grpc.aio.BaseError):
        raise error  # the connection is gone, or the call was aborted: gRPC knows
    request_error: RequestError = as_request_error(error)
    metadata = (*(context.trailing_metadata() or ()), *trailing_metadata_of(request_error))
    await context.abort(status_of(request_error), str(request_error), trailing_metadata=metadata)
