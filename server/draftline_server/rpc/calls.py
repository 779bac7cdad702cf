"""One record per call, from its first to its last moment: the request id, the log line, the counts.

The log line has numbers and codes only, never a prompt or an output.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from draftline_server.core.clock import Clock
from draftline_server.core.generation import GenerationSummary
from draftline_server.errors import InternalError, InvalidRequestError, RequestError
from draftline_server.frontend import check_request_id
from draftline_server.log import log_event
from draftline_server.metrics import ServerMetrics
from draftline_server.rpc.interceptors import Context
from draftline_server.rpc.status import as_request_error, status_of

_SHORT_DIGEST = len("sha256:") + 12

# A client gives up at its own deadline, which is a moment before the server's idea of it.
_DEADLINE_TOLERANCE_SECONDS = 0.05

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CallRecord:
    """What the log and the metrics will say about a call."""

    method: str
    request_id: str
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    summary: GenerationSummary | None = None
    is_accepted: bool = False


class Calls:
    """The calls in progress. Belongs to the event loop."""

    def __init__(
        self, *, metrics: ServerMetrics, request_id_header: str, clock: Clock = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._header = request_id_header
        self._clock = clock
        self._num_open = 0
        self._last_began_at = -math.inf
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.pair_digest: str | None = None

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def seconds_since_last(self) -> float:
        """Since the last call began; infinite before the first."""
        return self._clock() - self._last_began_at

    async def wait_until_idle(self) -> None:
        """Returns when no call is in progress."""
        await self._is_idle.wait()

    @asynccontextmanager
    async def record(
        self, method: str, context: Context, *, request_id: str = "", level: int = logging.INFO
    ) -> AsyncIterator[CallRecord]:
        """Spans a call. The id is the message's, else the metadata's, else made here; clients get it
        in the initial metadata, of a refused call in the trailing metadata. Whatever ends the call leaves as
        a `RequestError` or a cancellation."""
        record = CallRecord(method, uuid.uuid4().hex)
        started_at = self._last_began_at = self._clock()
        self._num_open += 1
        self._is_idle.clear()
        error: RequestError | None = None
        try:
            record.request_id = self._choose_request_id(request_id, context) or record.request_id
            yield record
            await self.accept(record, context)
        except BaseException as caught:
            if not record.is_accepted:
                context.set_trailing_metadata(((self._header, record.request_id),))
            error = as_request_error(caught, is_past_deadline=_is_past_deadline(context))
            if isinstance(error, InternalError) and error is not caught:
                raise error from caught
            raise
        finally:
            self._finish(record, error, duration_seconds=self._clock() - started_at, level=level)

    async def accept(self, record: CallRecord, context: Context) -> None:
        """Sends the initial metadata. Not before: a client that has them cannot try again by itself."""
        if not record.is_accepted:
            record.is_accepted = True
            await context.send_initial_metadata(((self._header, record.request_id),))

    def _choose_request_id(self, from_message: str, context: Context) -> str | None:
        request_id = from_message or self._from_metadata(context)
        if request_id:
            check_request_id(request_id)
        return request_id

    def _from_metadata(self, context: Context) -> str | None:
        for key, value in context.invocation_metadata() or ():
            if key == self._header and isinstance(value, str):
                return value
        return None

    def _finish(
        self, record: CallRecord, error: RequestError | None, *, duration_seconds: float, level: int
    ) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._is_idle.set()
        code = status_of(error).name if error is not None else "OK"
        if error is not None:
            self._metrics.observe_error(code)
        elif record.summary is not None:
            self._metrics.observe_finish(record.summary)
        summary = record.summary
        stats = summary.speculation if summary is not None else None
        log_event(
            _logger,
            max(level, logging.ERROR if isinstance(error, InternalError) else level),
            "request finished",
            method=record.method,
            request_id=record.request_id,
            code=code,
            reason=_loggable(error) if error is not None else None,
            duration_seconds=duration_seconds,
            queue_seconds=summary.queue_seconds if summary is not None else None,
            time_to_first_token_seconds=summary.time_to_first_token_seconds if summary is not None else None,
            prompt_tokens=record.num_prompt_tokens,
            output_tokens=record.num_output_tokens,
            draft_tokens=stats.draft_tokens if stats is not None else None,
            accepted_tokens=stats.accepted_tokens if stats is not None else None,
            acceptance_rate=stats.accepted_tokens / stats.draft_tokens
            if stats and stats.draft_tokens
            else None,
            finish_reason=summary.finish_reason.value if summary is not None else None,
            pair_digest=self.pair_digest[:_SHORT_DIGEST] if self.pair_digest is not None else None,
        )


def _loggable(error: RequestError) -> str:
    """What the client was told, less what may be the client's own words."""
    if isinstance(error, InvalidRequestError) and error.quotes_input:
        return f"{error.field}: refused, for a reason that may quote it"
    return str(error)


def _is_past_deadline(context: Context) -> bool:
    # None without a deadline, whatever the stubs say.
    remaining: float | None = context.time_remaining()
    return remaining is not None and remaining <= _DEADLINE_TOLERANCE_SECONDS
