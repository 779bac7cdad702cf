"""The one place that translates errors into gRPC status codes."""

from __future__ import annotations

import asyncio
import logging
import secrets

import grpc

from draftline_server.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from draftline_server.log import log_event

PUSHBACK_KEY = "grpc-retry-pushback-ms"
_DEFAULT_PUSHBACK_SECONDS = 1.0

_CODES: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    CancelledError: grpc.StatusCode.CANCELLED,
    InternalError: grpc.StatusCode.INTERNAL,
}

_logger = logging.getLogger(__name__)


def status_of(error: RequestError) -> grpc.StatusCode:
    """The status code of an error."""
    return _CODES.get(type(error), grpc.StatusCode.INTERNAL)


def trailing_metadata_of(error: RequestError) -> tuple[tuple[str, str], ...]:
    """Tells clients when a retry is worth trying, where it is.

    gRPC's own retries, where a client's service config asks for them, obey it.
    """
    if not isinstance(error, (QueueFullError, UnavailableError)):
        return ()
    seconds = (
        error.retry_after_seconds if error.retry_after_seconds is not None else _DEFAULT_PUSHBACK_SECONDS
    )
    return ((PUSHBACK_KEY, str(round(seconds * 1000))),)


def as_request_error(error: BaseException, *, is_past_deadline: bool = False) -> RequestError:
    """Any exception of a call as one of the tree. What is unexpected is logged, and only its id shown."""
    match error:
        case RequestError():
            return error
        case TimeoutError():
            return DeadlineError("the request's time ran out")
        case asyncio.CancelledError() | grpc.aio.BaseError():
            # gRPC cancels the task of a call whose client is gone, and fails what writes to one.
            if is_past_deadline:
                return DeadlineError("the client's deadline passed")
            return CancelledError("the client cancelled the request or disconnected")
    error_id = secrets.token_hex(8)
    log_event(_logger, logging.ERROR, "call failed unexpectedly", error_id=error_id, exc_info=error)
    return InternalError(f"internal error {error_id}")
