"""One request's way from token ids to the caller: stops, text, log-probabilities, the summary."""

from __future__ import annotations

from collections.abc import Sequence

from draftline_server.core.detokenizer import Decode, IncrementalDecoder, StopChecker
from draftline_server.core.generation import (
    FinishReason,
    GenerationDelta,
    GenerationSummary,
    TokenLogprobs,
)
from draftline_server.core.request import Request


class RequestOutput:
    """Collects what a request's tokens say between two deltas."""

    def __init__(self, request: Request, *, decode: Decode, eos_token_ids: frozenset[int]) -> None:
        sampling = request.spec.sampling
        self.end_token_ids = request.end_token_ids(eos_token_ids)
        self.finish_reason: FinishReason | None = None
        self.matched_stop: int | str | None = None
        self._request = request
        self._decoder = IncrementalDecoder(decode)
        self._stops = StopChecker(sampling.stop, include_stop=sampling.include_stop_string)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def commit(self, token_id: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Adds one token to the request. True where generation ends with it.

        In this order: end-of-sequence and stop tokens, stop strings, max_tokens. So a token that
        both matches and is the last one allowed counts as a stop.
        """
        request = self._request
        request.token_ids.append(token_id)
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        may_stop = request.num_output_tokens >= request.spec.sampling.min_tokens
        if token_id in self.end_token_ids and may_stop:
            return self._finish(FinishReason.STOP, token_id)
        text, match = self._stops.push(self._decoder.push(token_id), may_stop=may_stop)
        self._text.append(text)
        if match is not None:
            return self._finish(FinishReason.STOP, match.stop, is_text_complete=True)
        if request.num_remaining_tokens <= 0:
            return self._finish(FinishReason.LENGTH, None)
        return False

    def _finish(
        self, reason: FinishReason, matched_stop: int | str | None, *, is_text_complete: bool = False
    ) -> bool:
        self.finish_reason = reason
        self.matched_stop = matched_stop
        if not is_text_complete:
            self._flush_text()
        return True

    def _flush_text(self) -> None:
        """Releases what was held back; an incomplete character may still complete a stop string."""
        text, match = self._stops.push(self._decoder.flush())
        self._text.append(text)
        if match is not None:
            self.finish_reason, self.matched_stop = FinishReason.STOP, match.stop
        else:
            self._text.append(self._stops.flush())

    def take_delta(self, summary: GenerationSummary | None = None) -> GenerationDelta:
        """What was added since the last delta."""
        delta = GenerationDelta(
            request_id=self._request.request_id,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            summary=summary,
        )
        self._text, self._token_ids, self._logprobs = [], [], []
        return delta

    def summarize(self, now: float) -> GenerationSummary:
        """The summary of a request that has just ended by itself."""
        request, spec = self._request, self._request.spec
        assert self.finish_reason is not None, "the request has not ended"
        first_scheduled = now if request.first_scheduled_time is None else request.first_scheduled_time
        first_token = now if request.first_token_time is None else request.first_token_time
        return GenerationSummary(
            request_id=request.request_id,
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_truncated_prompt_tokens=spec.num_truncated_prompt_tokens,
            queue_seconds=first_scheduled - spec.arrival_time,
            time_to_first_token_seconds=first_token - spec.arrival_time,
            end_to_end_seconds=now - spec.arrival_time,
            speculation=request.stats,
        )


def token_logprobs(
    token_ids: Sequence[int], values: Sequence[tuple[float, list[tuple[int, float]]]]
) -> list[TokenLogprobs]:
    """Pairs tokens with what the target said about them."""
    return [
        TokenLogprobs(token_id, logprob, tuple(top))
        for token_id, (logprob, top) in zip(token_ids, values, strict=True)
    ]
