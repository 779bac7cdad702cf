"""Requests for tests of parts that work on them, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftline_server.core.generation import GenerationRequest
from draftline_server.core.request import Request
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    output: Sequence[int] = (),
    priority: int = 0,
    sequence_number: int = 0,
    seed: int = 7,
    speculation: SpeculationParams | None = None,
    arrival_time: float = 0.0,
    num_truncated_prompt_tokens: int = 0,
    **sampling: Any,
) -> Request:
    """A request as the engine would hold it after `output` was committed; nothing of it is cached."""
    spec = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**({"max_tokens": 16} | sampling)),
        speculation=speculation or SpeculationParams(),
        priority=priority,
        arrival_time=arrival_time,
        num_truncated_prompt_tokens=num_truncated_prompt_tokens,
    )
    request = Request(spec, seed=seed, sequence_number=sequence_number)
    request.token_ids.extend(output)
    return request
