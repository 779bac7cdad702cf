"""Between the wire's messages and the domain's values. Checks only what the domain cannot express."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from draftline.v1 import inference_pb2 as pb
from draftline_server.core.generation import (
    FinishReason,
    GenerationDelta,
    GenerationSummary,
    SpeculationStats,
    TokenLogprobs,
)
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams, check_counts
from draftline_server.core.served_pair import ModelDescription
from draftline_server.errors import InvalidRequestError
from draftline_server.frontend import (
    MAX_CHAT_MESSAGES,
    ChatInput,
    GenerationCall,
    PromptInput,
    TextInput,
    TokenIdsInput,
)

_METHODS = {
    pb.SPECULATION_METHOD_NGRAM: "ngram",
    pb.SPECULATION_METHOD_DRAFT_MODEL: "draft_model",
}
_METHODS_BY_NAME = {name: value for value, name in _METHODS.items()}
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_REPEATED = ("stop", "stop_token_ids", "logit_bias")
_OPTIONAL = tuple(f.name for f in fields(SamplingParams) if f.name not in _REPEATED)


def call_from_pb(request: pb.GenerateRequest, request_id: str) -> GenerationCall:
    """A request as a call; raises `InvalidRequestError` where it has no input or too much of something.

    This runs on the event loop and before a place in the queue is taken, so nothing here may take long.
    """
    return GenerationCall(
        request_id=request_id,
        prompt=prompt_from_pb(request),
        sampling=sampling_from_pb(request.sampling),
        speculation=speculation_from_pb(request.speculation),
        priority=request.priority,
    )


def prompt_from_pb(request: pb.GenerateRequest | pb.TokenizeRequest) -> PromptInput:
    """The input of a request; raises `InvalidRequestError` where there is none."""
    match request.WhichOneof("input"):
        case "text":
            return TextInput(request.text)
        case "chat":
            if (count := len(request.chat.messages)) > MAX_CHAT_MESSAGES:
                reason = f"{count} messages, at most {MAX_CHAT_MESSAGES} are allowed"
                raise InvalidRequestError("chat.messages", reason)
            return ChatInput(tuple((message.role, message.content) for message in request.chat.messages))
        case "token_ids" if isinstance(request, pb.GenerateRequest):
            return TokenIdsInput(request.token_ids.ids)
    choices = "text or chat" if isinstance(request, pb.TokenizeRequest) else "text, token_ids or chat"
    raise InvalidRequestError("input", f"is missing; set one of {choices}")


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Unset fields get the defaults of `SamplingParams`; raises `InvalidRequestError` for too much."""
    check_counts(stop=message.stop, stop_token_ids=message.stop_token_ids, logit_bias=message.logit_bias)
    given: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        **given,
    )


def speculation_from_pb(message: pb.SpeculationParams) -> SpeculationParams:
    """Raises `InvalidRequestError` for a method without a name."""
    # One more than there are must repeat one, and of millions not all are looked at.
    for index, value in enumerate(message.methods[: len(_METHODS) + 1]):
        if value not in _METHODS:
            raise InvalidRequestError(f"speculation.methods[{index}]", f"{value} is not a method")
    return SpeculationParams(
        enabled=message.enabled if message.HasField("enabled") else None,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        methods=tuple(_METHODS[value] for value in message.methods[: len(_METHODS) + 1]),
    )


def chunk_to_pb(delta: GenerationDelta) -> pb.GenerateStreamResponse:
    # Set in place, which takes half as long as to make a chunk and have it copied: there is one per token.
    message = pb.GenerateStreamResponse()
    chunk = message.chunk
    chunk.text = delta.text
    chunk.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        chunk.logprobs.extend(map(logprobs_to_pb, delta.logprobs))
    return message


def logprobs_to_pb(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top=[pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
    )


def summary_to_pb(summary: GenerationSummary, request_id: str) -> pb.Summary:
    """`request_id` is the client's: the summary's own is the engine's key."""
    message = pb.Summary(
        request_id=request_id,
        finish_reason=_FINISH_REASONS[summary.finish_reason],
        usage=pb.Usage(
            prompt_tokens=summary.num_prompt_tokens,
            completion_tokens=summary.num_output_tokens,
            cached_tokens=summary.num_cached_tokens,
        ),
        timings=pb.Timings(
            queue_ns=_nanoseconds(summary.queue_seconds),
            time_to_first_token_ns=_nanoseconds(summary.time_to_first_token_seconds),
            end_to_end_ns=_nanoseconds(summary.end_to_end_seconds),
        ),
        speculation=_speculation_to_pb(summary.speculation),
        num_truncated_prompt_tokens=summary.num_truncated_prompt_tokens,
    )
    match summary.matched_stop:
        case int(token_id):
            message.matched_stop_token_id = token_id
        case str(text):
            message.matched_stop_string = text
    return message


def model_to_pb(model: ModelDescription) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_context_length=model.max_context_length,
        dtype=model.dtype,
        digest=model.digest,
    )


def methods_to_pb(names: tuple[str, ...]) -> list[pb.SpeculationMethod]:
    return [_METHODS_BY_NAME[name] for name in names]


def _speculation_to_pb(stats: SpeculationStats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        drafts=stats.drafts,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        accepted_tokens_per_position=stats.accepted_tokens_per_position,
        decode_steps=stats.decode_steps,
    )


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
