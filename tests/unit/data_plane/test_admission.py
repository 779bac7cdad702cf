"""An admitted request always fits the server: its prompt, its output and every number in it."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from draftline_server.core.admission import RequestLimits, admit
from draftline_server.core.generation import GenerationRequest
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.errors import InvalidRequestError

CONTEXT = 20


def admit_prompt(
    prompt: list[int],
    *,
    context: int = CONTEXT,
    overflow: Literal["reject", "truncate_left"] = "reject",
    max_tokens_per_request: int = 8,
    speculation: SpeculationParams | None = None,
    **sampling: Any,
) -> GenerationRequest:
    return admit(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        speculation=speculation or SpeculationParams(),
        limits=RequestLimits(
            vocab_size=100,
            max_context_length=context,
            max_tokens_per_request=max_tokens_per_request,
            context_overflow=overflow,
            methods=("ngram",),
            num_speculative_tokens=4,
        ),
        now=3.0,
        deadline=9.0,
        queue_deadline=5.0,
        priority=2,
        prompt_field="prompt.token_ids",
    )


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "admitted"),
    [
        pytest.param(5, None, 8, id="none-is-the-server's-most"),
        pytest.param(5, 3, 3, id="fewer"),
        pytest.param(5, 8, 8, id="exactly-the-most"),
        pytest.param(5, 9, 8, id="more"),
        pytest.param(5, 2**63 - 1, 8, id="huge"),
        pytest.param(15, None, 5, id="none-in-a-nearly-full-context"),
        pytest.param(15, 8, 5, id="more-than-the-context-has-room-for"),
        pytest.param(CONTEXT - 1, 1, 1, id="room-for-one"),
        pytest.param(CONTEXT - 1, None, 1, id="room-for-one-and-none-asked"),
    ],
)
def test_max_tokens_is_clamped_to_the_server_and_the_context(
    prompt_length: int, max_tokens: int | None, admitted: int
) -> None:
    request = admit_prompt([1] * prompt_length, max_tokens=max_tokens)
    assert request.sampling.max_tokens == admitted
    assert len(request.prompt_token_ids) + admitted <= CONTEXT


def test_min_tokens_never_exceeds_what_max_tokens_became() -> None:
    request = admit_prompt([1] * 15, min_tokens=12)
    assert (request.sampling.min_tokens, request.sampling.max_tokens) == (5, 5)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_without_room_for_one_token_is_refused_with_both_numbers(length: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        admit_prompt([1] * length)
    assert caught.value.field == "prompt.token_ids"
    assert str(length) in caught.value.reason
    assert str(CONTEXT) in caught.value.reason


@pytest.mark.parametrize(
    ("length", "max_tokens", "server_limit", "kept", "admitted"),
    [
        pytest.param(50, 3, 2048, 17, 3, id="room-for-all-that-is-asked-for"),
        pytest.param(CONTEXT - 1, 3, 2048, 17, 3, id="also-beside-what-would-have-fit-alone"),
        pytest.param(17, 3, 2048, 17, 3, id="nothing-to-cut"),
        pytest.param(50, 10, 2048, 10, 10, id="half-the-context"),
        pytest.param(50, 15, 2048, 10, 10, id="at-most-half-the-context"),
        pytest.param(50, 2**63 - 1, 2048, 10, 10, id="as-many-as-possible"),
        pytest.param(3, 2**63 - 1, 2048, 3, 17, id="as-many-as-possible-after-a-short-prompt"),
        pytest.param(50, 15, 8, 12, 8, id="no-more-than-the-server-gives"),
        pytest.param(50, None, 2048, 15, 5, id="a-quarter-where-none-is-asked-for"),
        pytest.param(15, None, 2048, 15, 5, id="a-quarter-is-free"),
        pytest.param(50, None, 2, 18, 2, id="a-quarter-is-more-than-the-server-gives"),
    ],
)
def test_or_is_cut_from_the_left_where_the_server_says_so_and_tells(
    length: int, max_tokens: int | None, server_limit: int, kept: int, admitted: int
) -> None:
    request = admit_prompt(
        list(range(length)),
        overflow="truncate_left",
        max_tokens=max_tokens,
        max_tokens_per_request=server_limit,
    )
    assert request.prompt_token_ids == tuple(range(length - kept, length))
    assert request.num_truncated_prompt_tokens == length - kept
    assert request.sampling.max_tokens == admitted


@pytest.mark.parametrize("context", range(2, 10))
@pytest.mark.parametrize("max_tokens", [None, 1, 4, 9, 100])
def test_a_cut_leaves_something_of_the_prompt_and_room_for_something(
    context: int, max_tokens: int | None
) -> None:
    request = admit_prompt([1] * 50, context=context, overflow="truncate_left", max_tokens=max_tokens)
    assert request.sampling.max_tokens is not None
    assert min(len(request.prompt_token_ids), request.sampling.max_tokens) >= 1
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == context


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        pytest.param([], "prompt.token_ids", id="empty"),
        pytest.param([1, 100], "prompt.token_ids[1]", id="beyond-the-vocabulary"),
        pytest.param([-1], "prompt.token_ids[0]", id="negative"),
        pytest.param([1] * 30 + [2**40], "prompt.token_ids[30]", id="huge"),
    ],
)
def test_a_prompt_that_is_no_prompt_is_refused(prompt: list[int], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        admit_prompt(prompt, overflow="truncate_left")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        pytest.param({"top_p": 0.0}, "sampling.top_p", id="sampling"),
        pytest.param(
            {"speculation": SpeculationParams(methods=("draft_model",))},
            "speculation.methods[0]",
            id="method",
        ),
        pytest.param(
            {"speculation": SpeculationParams(max_draft_tokens=5)},
            "speculation.max_draft_tokens",
            id="length",
        ),
    ],
)
def test_parameters_are_checked_before_anything_else(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        admit_prompt([], **options)
    assert caught.value.field == field


def test_everything_else_is_carried_over() -> None:
    request = admit_prompt([1, 2], seed=4, temperature=0.5)
    assert (request.request_id, request.prompt_token_ids) == ("r", (1, 2))
    assert (request.arrival_time, request.deadline, request.queue_deadline, request.priority) == (3, 9, 5, 2)
    assert (request.sampling.seed, request.sampling.temperature) == (4, 0.5)
    assert request.num_truncated_prompt_tokens == 0
