"""Turns a checked-nothing call into a `GenerationRequest`, or refuses it with the field's name.

Pure: it knows the server's limits and no engine, so it runs before a request costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from draftline_server.core.generation import GenerationRequest
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams, check_token_id
from draftline_server.errors import InvalidRequestError

# Shares of the context that a cut prompt leaves for output: at most, and where nobody says how much.
MAX_OUTPUT_SHARE = 1 / 2
DEFAULT_OUTPUT_SHARE = 1 / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may ask of this server."""

    vocab_size: int
    max_context_length: int
    """Prompt and output together, in tokens."""
    max_tokens_per_request: int
    context_overflow: Literal["reject", "truncate_left"] = "reject"
    methods: tuple[str, ...] = ()
    num_speculative_tokens: int = 0


def admit(
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    speculation: SpeculationParams,
    limits: RequestLimits,
    now: float,
    deadline: float | None = None,
    queue_deadline: float | None = None,
    priority: int = 0,
    prompt_field: str = "input",
) -> GenerationRequest:
    """Validates everything; truncates the prompt and clamps max_tokens as configured.

    Raises `InvalidRequestError`. The request returned always has ``sampling.max_tokens`` set, and
    prompt plus max_tokens fit the context.
    """
    sampling.validate(limits.vocab_size)
    speculation.validate(
        available_methods=limits.methods, num_speculative_tokens=limits.num_speculative_tokens
    )
    if not prompt_token_ids:
        raise InvalidRequestError(prompt_field, "the prompt has no tokens")
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= limits.vocab_size:
        for index, token_id in enumerate(prompt_token_ids):
            check_token_id(f"{prompt_field}[{index}]", token_id, limits.vocab_size)
    prompt = _fit_prompt(prompt_token_ids, sampling.max_tokens, limits, prompt_field)
    room = limits.max_context_length - len(prompt)
    max_tokens = min(sampling.max_tokens or room, limits.max_tokens_per_request, room)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens)),
        speculation=speculation,
        priority=priority,
        arrival_time=now,
        deadline=deadline,
        queue_deadline=queue_deadline,
        num_truncated_prompt_tokens=len(prompt_token_ids) - len(prompt),
    )


def _fit_prompt(
    prompt: Sequence[int], max_tokens: int | None, limits: RequestLimits, prompt_field: str
) -> tuple[int, ...]:
    """The prompt, cut from the left where the server does that; else there must be room for one token."""
    context = limits.max_context_length
    if limits.context_overflow == "truncate_left":
        return tuple(prompt[-(context - _output_room(max_tokens, limits)) :])
    if len(prompt) >= context:
        raise InvalidRequestError(
            prompt_field,
            f"the prompt has {len(prompt)} tokens, at most {context - 1} fit "
            f"the context of {context} with room for one more",
        )
    return tuple(prompt)


def _output_room(max_tokens: int | None, limits: RequestLimits) -> int:
    """Tokens that a prompt must leave, where it is cut for its output.

    At most a share of the context: a max_tokens that means "as many as possible" must not cost the prompt.
    """
    context = limits.max_context_length
    wanted = DEFAULT_OUTPUT_SHARE * context if max_tokens is None else max_tokens
    return max(1, int(min(wanted, limits.max_tokens_per_request, MAX_OUTPUT_SHARE * context)))
