"""A small client that streams one completion: what `draftline-server generate` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from draftline.v1 import inference_pb2 as pb
from draftline.v1 import inference_pb2_grpc
from draftline_server.errors import DraftlineError


class CallFailedError(DraftlineError):
    """The server refused or ended the call. The message is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """One completion. `sampling` has fields of the proto's message; the server has defaults for the rest."""

    prompt: str
    is_chat: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    use_speculation: bool = True
    timeout_seconds: float | None = None


def build_request(options: CompletionOptions) -> pb.GenerateRequest:
    """Raises `CallFailedError` for a value that the wire cannot carry."""
    try:
        request = pb.GenerateRequest(sampling=pb.SamplingParams(**options.sampling))
    except (ValueError, TypeError) as error:
        raise CallFailedError(f"a sampling value cannot be sent: {error}") from error
    try:
        if options.is_chat:
            request.chat.messages.add(role="user", content=options.prompt)
        else:
            request.text = options.prompt
    except ValueError as error:
        raise CallFailedError("the prompt is not UTF-8 text") from error
    if not options.use_speculation:
        request.speculation.enabled = False
    return request


def stream_completion(address: str, options: CompletionOptions, show: Callable[[str], None]) -> pb.Summary:
    """Calls `show` with each piece of text and returns the summary; raises `CallFailedError`."""
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            for message in stub.GenerateStream(build_request(options), timeout=options.timeout_seconds):
                if message.WhichOneof("message") == "summary":
                    return message.summary
                show(message.chunk.text)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            raise CallFailedError(f"{code.name}: {details}") from error
    raise CallFailedError("the stream ended without a summary")


def describe_summary(summary: pb.Summary) -> str:
    """One line of statistics for people."""
    usage, timings, speculation = summary.usage, summary.timings, summary.speculation
    seconds = timings.end_to_end_ns / 1e9
    decode_seconds = (timings.end_to_end_ns - timings.time_to_first_token_ns) / 1e9
    parts = [
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)",
        f"{usage.completion_tokens} output tokens in {seconds:.2f} s",
        f"first after {timings.time_to_first_token_ns / 1e9:.2f} s",
    ]
    if usage.completion_tokens > 1 and decode_seconds > 0:
        parts.append(f"then {(usage.completion_tokens - 1) / decode_seconds:.1f} tokens/s")
    if speculation.draft_tokens:
        rate = speculation.accepted_tokens / speculation.draft_tokens
        accepted = f"{speculation.accepted_tokens} of {speculation.draft_tokens} draft tokens"
        parts.append(f"accepted {accepted} ({rate:.0%})")
    else:
        parts.append("nothing drafted")
    reason = pb.FinishReason.Name(summary.finish_reason).removeprefix("FINISH_REASON_").lower()
    parts.append(f"finish reason {reason}")
    return ", ".join(parts)
