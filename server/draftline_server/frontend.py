"""The way of a call to the engine, whatever protocol it came by: place, tokens, admission, stream.

A place in the queue comes first, so a full queue costs nothing. Tokenizing and admission run in a small
pool of threads, since a long prompt would hold up every stream on the event loop. Must not know gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from draftline_server.core.admission import RequestLimits, admit
from draftline_server.core.clock import Clock
from draftline_server.core.generation import GenerationRequest
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.core.served_pair import ServedPair
from draftline_server.errors import InvalidRequestError, QueueFullError, UnavailableError
from draftline_server.runner_thread import RETRY_AFTER_SECONDS, EngineThread, RequestStream

MAX_REQUEST_ID_LENGTH = 128
# Rendering costs 0.1 ms each, even of empty ones, of which millions fit a message.
MAX_CHAT_MESSAGES = 4096
TOKENIZER_THREADS = 2

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class TextInput:
    text: str


@dataclass(frozen=True, slots=True)
class TokenIdsInput:
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatInput:
    messages: Sequence[tuple[str, str]]
    """(role, content)."""


PromptInput = TextInput | TokenIdsInput | ChatInput


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """A request as it came, nothing checked."""

    request_id: str
    prompt: PromptInput
    sampling: SamplingParams
    speculation: SpeculationParams
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a call arrived and when it must end, on the engine's clock."""

    arrival: float
    deadline: float


class Frontend:
    """Everything between a protocol and the engine."""

    def __init__(
        self,
        engine_thread: EngineThread,
        *,
        request_timeout_seconds: float,
        queue_timeout_seconds: float,
        max_pending_tokenizations: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._engine_thread = engine_thread
        self._request_timeout_seconds = request_timeout_seconds
        self._queue_timeout_seconds = queue_timeout_seconds
        self._max_pending_tokenizations = max_pending_tokenizations
        self._num_pending_tokenizations = 0
        self._clock = clock
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._pair: ServedPair | None = None

    def open(self, pair: ServedPair) -> None:
        """Takes calls from now on."""
        self._pair = pair

    def close(self) -> None:
        """Drops what waits for a tokenizer."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def pair(self) -> ServedPair:
        """What is served; raises `UnavailableError` while it is loading."""
        if self._pair is None:
            raise UnavailableError("the models are loading", retry_after_seconds=RETRY_AFTER_SECONDS)
        return self._pair

    def start_timing(self, client_seconds: float | None) -> Timing:
        """Starts the clock of a call whose client waits for so long, if it said."""
        arrival = self._clock()
        limits = [self._request_timeout_seconds] + ([client_seconds] if client_seconds is not None else [])
        return Timing(arrival=arrival, deadline=arrival + min(limits))

    def remaining_seconds(self, timing: Timing) -> float:
        return timing.deadline - self._clock()

    async def submit(self, call: GenerationCall, timing: Timing) -> RequestStream:
        """Admits a call and queues it. Raises any `RequestError`."""
        pair = self.pair
        with self._engine_thread.reserve() as place:
            request = await self._run_in_pool(lambda: self._prepare(pair, call, timing))
            return self._engine_thread.submit(request, place)

    async def tokenize(self, prompt: PromptInput) -> list[int]:
        """The ids that `submit` would feed to the target, before any truncation."""
        pair = self.pair
        if self._num_pending_tokenizations >= self._max_pending_tokenizations:
            raise QueueFullError(
                "too many texts wait to be tokenized", retry_after_seconds=RETRY_AFTER_SECONDS
            )
        self._num_pending_tokenizations += 1
        try:
            return await self._run_in_pool(lambda: _tokenize(pair, prompt)[0])
        finally:
            self._num_pending_tokenizations -= 1

    async def _run_in_pool(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def _prepare(self, pair: ServedPair, call: GenerationCall, timing: Timing) -> GenerationRequest:
        prompt_token_ids, prompt_field = _tokenize(pair, call.prompt)
        return admit(
            request_id=call.request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=call.sampling,
            speculation=call.speculation,
            limits=pair.engine.limits,
            now=timing.arrival,
            deadline=timing.deadline,
            queue_deadline=timing.arrival + self._queue_timeout_seconds,
            priority=call.priority,
            prompt_field=prompt_field,
        )


def check_request_id(request_id: str) -> None:
    """Raises `InvalidRequestError` unless the id is short and safe to write into logs and headers."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequestError(
            "request_id", f"{len(request_id)} characters, at most {MAX_REQUEST_ID_LENGTH} are allowed"
        )
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequestError("request_id", "only printable ASCII characters are allowed")


def _tokenize(pair: ServedPair, prompt: PromptInput) -> tuple[list[int], str]:
    """The prompt's ids, and the field that they come from."""
    match prompt:
        case TokenIdsInput(ids):
            return list(ids), "token_ids"
        case TextInput(text):
            _refuse_hopeless(len(text), pair, "text")
            return pair.tokenizer.encode(text), "text"
        case ChatInput(messages):
            if not pair.tokenizer.has_chat_template:
                raise InvalidRequestError("chat", "this model has no chat template; use text or token_ids")
            _refuse_hopeless(sum(len(content) for _, content in messages), pair, "chat")
            return pair.tokenizer.encode_chat(list(messages)), "chat"


def _refuse_hopeless(num_characters: int, pair: ServedPair, field: str) -> None:
    """Refuses what cannot fit without tokenizing it."""
    limits: RequestLimits = pair.engine.limits
    longest = limits.max_context_length * pair.description.longest_token_length
    if limits.context_overflow == "reject" and num_characters > longest:
        raise InvalidRequestError(
            field,
            f"{num_characters} characters cannot fit the context of {limits.max_context_length} tokens",
        )
