"""A scripted engine: the engine's interface without a model, for tests of everything above it.

By default the output is the prompt, over and over. It schedules like the real engine in what callers can
see (seats, queue, deadlines, aborts, deltas of several tokens, speculation statistics) and computes
nothing. A test may hold it before a step, let it take single steps, or make a step raise or hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftline_server.core.admission import RequestLimits
from draftline_server.core.clock import Clock
from draftline_server.core.detokenizer import IncrementalDecoder
from draftline_server.core.generation import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationSummary,
    SpeculationStats,
    TokenLogprobs,
)
from draftline_server.core.served_pair import ModelDescription, PairDescription, ServedPair
from draftline_server.core.stats import EngineStatistics
from draftline_server.errors import DeadlineError, InvalidRequestError, RequestError

Script = Callable[[GenerationRequest, int], int]
"""The output token of a request at an index."""

EOS_TOKEN_ID = 256
BLOCK_SIZE = 16


def repeat_prompt(request: GenerationRequest, index: int) -> int:
    """The default script."""
    return request.prompt_token_ids[index % len(request.prompt_token_ids)]


class ByteTokenizer:
    """One token per byte of UTF-8; the only other token is the end of text."""

    vocab_size = 257

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.encoded: list[str] = []
        """Texts that were tokenized, so that tests can see that others were not."""

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return list(text.encode())

    def encode_chat(self, messages: list[tuple[str, str]]) -> list[int]:
        if not messages:
            raise InvalidRequestError("chat.messages", "is empty")
        return self.encode("".join(f"{role}: {content}\n" for role, content in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < EOS_TOKEN_ID).decode(errors="replace")


def _make_decoder() -> IncrementalDecoder:
    return IncrementalDecoder(ByteTokenizer().decode)


@dataclass(slots=True)
class _Scripted:
    request: GenerationRequest
    decoder: IncrementalDecoder = field(default_factory=_make_decoder)
    output: list[int] = field(default_factory=list)
    started_at: float | None = None
    first_token_at: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)


class ScriptedEngine:
    """See the module. Methods of the engine's interface are for one thread, the controls for any."""

    def __init__(
        self,
        *,
        limits: RequestLimits | None = None,
        max_running: int = 4,
        tokens_per_step: int = 3,
        num_blocks: int = 64,
        script: Script = repeat_prompt,
        clock: Clock = time.monotonic,
    ) -> None:
        self.limits = (
            limits
            if limits is not None
            else RequestLimits(
                vocab_size=ByteTokenizer.vocab_size,
                max_context_length=512,
                max_tokens_per_request=256,
                methods=("ngram",),
                num_speculative_tokens=5,
            )
        )
        self._max_running = max_running
        self._tokens_per_step = tokens_per_step
        self._num_blocks = num_blocks
        self._script = script
        self._clock = clock
        self._waiting: list[_Scripted] = []
        self._running: dict[str, _Scripted] = {}
        self._ended: list[GenerationDelta] = []
        self._totals = SpeculationStats()
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self.warm_ups = 0
        self._permits = threading.Semaphore(0)
        self._is_held = threading.Event()
        self._fault: BaseException | None = None
        self.step_began = threading.Event()
        """Set when a step begins; clear it to wait for the next one."""

    # ------------------------------------------------------------------------------------ controls

    def hold(self) -> None:
        """From the next step on, each step waits for `release`."""
        self._is_held.set()

    def release(self, num_steps: int = 1) -> None:
        """Lets held steps go."""
        self._permits.release(num_steps)

    def resume(self) -> None:
        """Ends `hold`."""
        self._is_held.clear()
        self._permits.release()

    def fail_next_step(self, fault: BaseException) -> None:
        """Makes the next step raise."""
        self._fault = fault

    # --------------------------------------------------------------------------- engine's interface

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def warm_up(self) -> None:
        self.warm_ups += 1

    def add_request(self, request: GenerationRequest) -> None:
        self._waiting.append(_Scripted(request))
        self._waiting.sort(key=lambda scripted: -scripted.request.priority)

    def abort(self, request_id: str, error: RequestError) -> None:
        known = request_id in self._running or any(s.request.request_id == request_id for s in self._waiting)
        self._running.pop(request_id, None)
        self._waiting = [s for s in self._waiting if s.request.request_id != request_id]
        if known:
            self._ended.append(GenerationDelta(request_id, error=error))

    def step(self) -> list[GenerationDelta]:
        self.step_began.set()
        if self._is_held.is_set():
            self._permits.acquire()
        if self._fault is not None:
            raise self._fault
        now = self._clock()
        self._expire(now)
        deltas, self._ended = self._ended, []
        while self._waiting and len(self._running) < self._max_running:
            scripted = self._waiting.pop(0)
            scripted.started_at = now
            self._num_prompt_tokens += len(scripted.request.prompt_token_ids)
            self._running[scripted.request.request_id] = scripted
        deltas += [self._advance(scripted) for scripted in list(self._running.values())]
        self._num_steps += 1
        return deltas

    def statistics(self) -> EngineStatistics:
        used = sum(
            -(-(len(s.request.prompt_token_ids) + len(s.output)) // BLOCK_SIZE)
            for s in self._running.values()
        )
        return EngineStatistics(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage_ratio=used / self._num_blocks,
            kv_blocks_used=used,
            kv_blocks_total=self._num_blocks,
            num_steps=self._num_steps,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_output_tokens,
            drafts={"ngram": self._totals.drafts},
            draft_tokens={"ngram": self._totals.draft_tokens},
            accepted_tokens={"ngram": self._totals.accepted_tokens},
            accepted_tokens_per_position={"ngram": tuple(self._totals.accepted_tokens_per_position)},
            speculation_active=True,
            last_batch_size=len(self._running),
        )

    # --------------------------------------------------------------------------------------- inside

    def _expire(self, now: float) -> None:
        for scripted in [*self._waiting, *self._running.values()]:
            request = scripted.request
            if request.deadline is not None and now >= request.deadline:
                self.abort(request.request_id, DeadlineError("the request's time ran out"))
            elif (
                request.queue_deadline is not None
                and scripted.started_at is None
                and now >= request.queue_deadline
            ):
                self.abort(request.request_id, DeadlineError("the request waited too long to be started"))

    def _advance(self, scripted: _Scripted) -> GenerationDelta:
        """Commits as many tokens as a step may, until one of them is a stop."""
        request, now = scripted.request, self._clock()
        max_tokens = request.sampling.max_tokens
        assert max_tokens is not None, "admission sets max_tokens"
        committed: list[int] = []
        finish: FinishReason | None = None
        matched: int | None = None
        while finish is None and len(committed) < self._tokens_per_step:
            token_id = self._script(request, len(scripted.output) + len(committed))
            committed.append(token_id)
            if self._is_stop(request, token_id):
                finish, matched = FinishReason.STOP, token_id
            elif len(scripted.output) + len(committed) >= max_tokens:
                finish = FinishReason.LENGTH
        scripted.output += committed
        self._num_output_tokens += len(committed)
        scripted.first_token_at = scripted.first_token_at or now
        self._count_draft(scripted, num_accepted_tokens=len(committed) - 1)
        text = "".join(map(scripted.decoder.push, committed))
        if finish is not None:
            text += scripted.decoder.flush()
            del self._running[request.request_id]
        return GenerationDelta(
            request.request_id,
            text=text,
            token_ids=tuple(committed),
            logprobs=_logprobs(request, committed),
            summary=_summarize(scripted, finish, matched, now) if finish is not None else None,
        )

    def _is_stop(self, request: GenerationRequest, token_id: int) -> bool:
        sampling = request.sampling
        return token_id in sampling.stop_token_ids or (token_id == EOS_TOKEN_ID and not sampling.ignore_eos)

    def _count_draft(self, scripted: _Scripted, *, num_accepted_tokens: int) -> None:
        scripted.stats.decode_steps += 1
        if scripted.request.speculation.enabled is False:
            return
        for stats in (scripted.stats, self._totals):
            stats.record(num_draft_tokens=self._tokens_per_step, num_accepted_tokens=num_accepted_tokens)


def describe_scripted_pair() -> PairDescription:
    """A description to go with `ScriptedEngine`."""
    target = ModelDescription(
        name="scripted",
        architecture="ScriptedForCausalLM",
        vocab_size=ByteTokenizer.vocab_size,
        max_context_length=512,
        dtype="float32",
        digest=f"sha256:{'1' * 64}",
    )
    return PairDescription(
        target=target,
        draft=None,
        pair_digest=f"sha256:{'2' * 64}",
        eos_token_ids=(EOS_TOKEN_ID,),
        device="cpu",
        longest_token_length=1,
    )


def build_scripted_pair(
    engine: ScriptedEngine | None = None, *, tokenizer: ByteTokenizer | None = None
) -> ServedPair:
    """What loading would yield."""
    return ServedPair(
        engine=engine if engine is not None else ScriptedEngine(),
        tokenizer=tokenizer if tokenizer is not None else ByteTokenizer(),
        description=describe_scripted_pair(),
    )


def _logprobs(request: GenerationRequest, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    count = request.sampling.logprobs
    if count is None:
        return ()
    return tuple(
        TokenLogprobs(token_id, -0.5, tuple((token_id, -0.5 - rank) for rank in range(count)))
        for token_id in token_ids
    )


def _summarize(
    scripted: _Scripted, finish: FinishReason, matched: int | None, now: float
) -> GenerationSummary:
    arrival = scripted.request.arrival_time
    assert scripted.started_at is not None, "only a started request ends by itself"
    assert scripted.first_token_at is not None, "only output ends a request"
    return GenerationSummary(
        request_id=scripted.request.request_id,
        finish_reason=finish,
        matched_stop=matched,
        num_prompt_tokens=len(scripted.request.prompt_token_ids),
        num_output_tokens=len(scripted.output),
        num_cached_tokens=0,
        num_truncated_prompt_tokens=scripted.request.num_truncated_prompt_tokens,
        queue_seconds=scripted.started_at - arrival,
        time_to_first_token_seconds=scripted.first_token_at - arrival,
        end_to_end_seconds=now - arrival,
        speculation=scripted.stats,
    )
