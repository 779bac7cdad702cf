"""The bridge between asyncio and the engine, which blocks: one thread owns the engine, nothing else calls it.

    event loop                                   engine thread
    reserve → submit ── inbox ────────────────→  add_request
    stream.close ────── aborts ───────────────→  abort
    streams ←────────── outbox, one wake-up ──── step

The thread loads the models too, so that everything of torch happens in one thread. It never waits for a
consumer: what a slow one has not read yet is merged, so it costs no more than the request's own output.
Without work it sleeps. It must not know gRPC, nor decide anything about tokens.

How it ends: an exception from a step is fatal, because nobody knows what state the engine is in. All
requests end with `InternalError`, `failure` is set, and the process is expected to end so that a supervisor
starts a new one. A step that takes longer than the limit makes the engine `HUNG`: its requests end with
`UnavailableError`, and if the step returns after all, serving goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from types import TracebackType
from typing import Self

from draftline_server.core.clock import Clock
from draftline_server.core.generation import GenerationDelta, GenerationRequest
from draftline_server.core.served_pair import ServedPair, ServingEngine
from draftline_server.core.stats import EngineStatistics
from draftline_server.errors import (
    CancelledError,
    InternalError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from draftline_server.log import log_event

RETRY_AFTER_SECONDS = 1.0

ErrorFactory = Callable[[], RequestError]

_logger = logging.getLogger(__name__)


class EngineHealth(Enum):
    """What the engine thread is able to do now."""

    LOADING = "loading"
    READY = "ready"
    HUNG = "hung"
    FAILED = "failed"
    STOPPED = "stopped"


class Place:
    """A place in the queue, held while a request is prepared; `submit` uses it up."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Gives the place back; a second call does nothing."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()


class RequestStream:
    """The deltas of one request, merged where the reader is slower. Belongs to the event loop.

    Iteration ends after the delta with the summary, or raises the `RequestError` that ended the request.
    Leaving the ``async with`` earlier cancels the request.
    """

    def __init__(self, key: str, *, num_prompt_tokens: int, cancel: Callable[[str], None]) -> None:
        self.key = key
        self.num_prompt_tokens = num_prompt_tokens
        self._cancel = cancel
        self._pending: list[GenerationDelta] = []
        self._error: RequestError | None = None
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None
        self._last_output_time: float | None = None

    def push(self, delta: GenerationDelta, now: float) -> float | None:
        """Adds a delta; returns the seconds since the last one with tokens. Ignored after the end."""
        if self._has_ended:
            return None
        self._has_ended = delta.is_final
        self._error = delta.error
        if delta.error is None:
            self._pending.append(delta)
        self._wake_reader()
        return self._measure_gap(now) if delta.token_ids else None

    def fail(self, error: RequestError) -> None:
        """Ends the stream with `error`, unless it has ended."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._wake_reader()

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        if not self._has_ended:
            self.fail(CancelledError("the request was cancelled"))
            self._cancel(self.key)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationDelta:
        if not (self._pending or self._has_ended):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._pending:
            pending, self._pending = self._pending, []
            return _merge(pending)
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():  # done: just woken, or cancelled
            self._reader.set_result(None)

    def _measure_gap(self, now: float) -> float | None:
        last, self._last_output_time = self._last_output_time, now
        return now - last if last is not None else None


def _merge(deltas: Sequence[GenerationDelta]) -> GenerationDelta:
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(d.text for d in deltas),
        token_ids=tuple(itertools.chain.from_iterable(d.token_ids for d in deltas)),
        logprobs=tuple(itertools.chain.from_iterable(d.logprobs for d in deltas)),
    )


class EngineThread:
    """Owns the engine. Every method is for the event loop that called `start`, and none blocks."""

    def __init__(
        self,
        build: Callable[[], ServedPair],
        *,
        max_concurrent_requests: int,
        max_queue_length: int,
        hang_seconds: float,
        clock: Clock = time.monotonic,
        observe_gap: Callable[[float], None] | None = None,
    ) -> None:
        """`build` loads the models; `observe_gap` is told the time between two outputs of a request."""
        self._build = build
        self._max_concurrent_requests = max_concurrent_requests
        self._max_queue_length = max_queue_length
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._observe_gap = observe_gap
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._numbers = itertools.count(1)
        self._started = False
        # Set by `start`.
        self._loop: asyncio.AbstractEventLoop
        self._loaded: asyncio.Future[ServedPair]
        self.num_submitted = 0
        """Requests handed to the engine so far."""
        self.failure = asyncio.Event()
        """Set once the engine has failed for good."""

        # Guards everything below, which both threads use.
        self._wake = threading.Condition()
        self._state = EngineHealth.LOADING
        self._is_stopping = False
        self._refusal: ErrorFactory | None = None
        self._inbox: list[GenerationRequest] = []
        self._aborts: list[tuple[str, RequestError]] = []
        self._streams: dict[str, RequestStream] = {}
        self._num_reserved = 0
        self._outbox: list[tuple[RequestStream, GenerationDelta]] = []
        self._is_flush_due = False
        self._statistics = EngineStatistics()
        self._busy_since: float | None = None

    # ------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """Starts loading. Must be called with the event loop running."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._loaded.add_done_callback(asyncio.Future.exception)  # nobody may be waiting any more
        self._started = True
        self._thread.start()

    async def wait_until_ready(self) -> ServedPair:
        """Returns what was loaded, after the warm-up; raises what loading raised."""
        return await asyncio.shield(self._loaded)

    @property
    def health(self) -> EngineHealth:
        with self._wake:
            return self._health()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs: a hung one cannot be stopped."""
        return self._thread.is_alive()

    async def stop(self, timeout_seconds: float) -> None:
        """Ends the thread after its present step; gives up after the timeout."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._started:
            await asyncio.to_thread(self._thread.join, timeout_seconds)

    # --------------------------------------------------------------------------------- requests

    def reserve(self) -> Place:
        """Takes a place for one more request, before any work is spent on it.

        Raises `UnavailableError` where the engine does not take requests, `QueueFullError` where
        `max_queue_length` requests wait.
        """
        with self._wake:
            self._check_open()
            if self._num_waiting_with(1) > self._max_queue_length:
                raise QueueFullError(
                    f"the queue is full: at most {self._max_queue_length} requests may wait",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            self._num_reserved += 1
        return Place(self._release)

    def submit(self, request: GenerationRequest, place: Place) -> RequestStream:
        """Hands an admitted request to the engine.

        The request's id is only a label: clients may use one twice. The engine gets a unique key.
        Raises `UnavailableError` where the engine has stopped taking requests since `reserve`.
        """
        key = f"{request.request_id}#{next(self._numbers)}"
        stream = RequestStream(key, num_prompt_tokens=len(request.prompt_token_ids), cancel=self.cancel)
        with self._wake:
            if self._health() is not EngineHealth.READY:
                raise self._unavailable()
            self._streams[key] = stream
            self._inbox.append(replace(request, request_id=key))
            self._notify()
        self.num_submitted += 1
        place.release()
        return stream

    def cancel(self, key: str) -> None:
        """Ends a request, wherever it is; its blocks are free before the next step."""
        with self._wake:
            if key in self._streams:
                self._aborts.append((key, CancelledError("the request was cancelled")))
                self._notify()

    def refuse(self, refusal: ErrorFactory) -> None:
        """From now on `reserve` raises; what has been accepted goes on."""
        with self._wake:
            self._refusal = refusal

    def fail_all(self, make_error: ErrorFactory) -> None:
        """Ends every request with an error of its own."""
        with self._wake:
            failed = list(self._streams.values())
            self._aborts.extend((stream.key, make_error()) for stream in failed)
            self._notify()
        for stream in failed:
            stream.fail(make_error())

    # --------------------------------------------------------------------------------- numbers

    @property
    def statistics(self) -> EngineStatistics:
        """As of the last step, but with the requests that the engine has not seen yet."""
        with self._wake:
            return replace(self._statistics, num_waiting=self._num_waiting())

    def _num_open(self) -> int:
        return len(self._streams) + self._num_reserved

    def _num_waiting(self) -> int:
        return max(0, self._num_open() - self._statistics.num_running)

    def _num_waiting_with(self, num_more: int) -> int:
        """How many would wait with more requests. Those that could start at once do not count.

        The engine lets requests wait although it could run more of them when its cache is full, so
        only where none waits are its free seats open to new ones.
        """
        known = self._statistics
        num_unseen = max(0, self._num_open() - known.num_running - known.num_waiting) + num_more
        num_seats = max(0, self._max_concurrent_requests - known.num_running) if not known.num_waiting else 0
        return known.num_waiting + max(0, num_unseen - num_seats)

    # ------------------------------------------------------------------------- with the lock held

    def _health(self) -> EngineHealth:
        is_busy = self._state is EngineHealth.READY and self._busy_since is not None
        if is_busy and self._clock() - (self._busy_since or 0.0) > self._hang_seconds:
            return EngineHealth.HUNG
        return self._state

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise self._refusal()
        if self._health() is not EngineHealth.READY:
            raise self._unavailable()

    def _unavailable(self) -> UnavailableError:
        reasons = {
            EngineHealth.LOADING: "the models are loading",
            EngineHealth.HUNG: "the engine does not respond",
            EngineHealth.FAILED: "the engine has failed",
            EngineHealth.STOPPED: "the server has stopped",
        }
        reason = reasons.get(self._health(), "the server is not ready")
        return UnavailableError(reason, retry_after_seconds=RETRY_AFTER_SECONDS)

    def _notify(self) -> None:
        if self._busy_since is None:
            self._busy_since = self._clock()
        self._wake.notify()

    def _release(self) -> None:
        with self._wake:
            self._num_reserved -= 1

    # ------------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            pair = self._build()
            pair.engine.warm_up()
        except BaseException as error:  # whatever it is, the event loop must learn of it
            self._call_soon(self._loaded.set_exception, error)
            return
        with self._wake:
            self._state = EngineHealth.READY
            self._statistics = pair.engine.statistics()
        self._call_soon(self._loaded.set_result, pair)
        try:
            while self._take_in(pair.engine):
                self._publish(pair.engine.step(), pair.engine.statistics())
        except BaseException as error:  # a panic of a library in Rust is no `Exception`
            self._fail(error)

    def _take_in(self, engine: ServingEngine) -> bool:
        """Waits for work and gives the engine what is new; False when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._aborts or self._is_stopping or engine.has_work):
                self._busy_since = None
                self._wake.wait()
            if self._is_stopping:
                self._state, self._busy_since = EngineHealth.STOPPED, None
                return False
            self._busy_since = self._clock()
            requests, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, []
        for request in requests:
            engine.add_request(request)
        for key, error in aborts:
            engine.abort(key, error)
        return True

    def _publish(self, deltas: Sequence[GenerationDelta], statistics: EngineStatistics) -> None:
        with self._wake:
            self._statistics = statistics
            for delta in deltas:
                final = delta.is_final
                stream = self._streams.pop(delta.request_id) if final else self._streams[delta.request_id]
                self._outbox.append((stream, delta))
            must_wake = bool(self._outbox) and not self._is_flush_due
            self._is_flush_due = self._is_flush_due or must_wake
        if must_wake:
            self._call_soon(self._flush)

    def _fail(self, error: BaseException) -> None:
        log_id = secrets.token_hex(8)
        log_event(_logger, logging.CRITICAL, "engine failed", error_id=log_id, exc_info=error)
        with self._wake:
            self._state, self._busy_since = EngineHealth.FAILED, None
            self._statistics = replace(self._statistics, num_running=0, num_waiting=0)
            failed = list(self._streams.values())
            self._streams.clear()
            self._inbox.clear()

        def tell() -> None:
            self._flush()
            for stream in failed:
                stream.fail(InternalError(f"internal error {log_id}"))
            self.failure.set()

        self._call_soon(tell)

    def _call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: the process is ending and nobody listens
            log_event(_logger, logging.DEBUG, "event loop was gone")

    # ----------------------------------------------------------------------------- the event loop

    def _flush(self) -> None:
        with self._wake:
            outbox, self._outbox = self._outbox, []
            self._is_flush_due = False
        now = self._clock()
        for stream, delta in outbox:
            gap = stream.push(delta, now)
            if gap is not None and self._observe_gap is not None:
                self._observe_gap(gap)
