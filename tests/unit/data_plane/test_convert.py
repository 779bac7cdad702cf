"""Between wire and domain: defaults of unset fields, every set one, and back."""

from __future__ import annotations

from dataclasses import fields

import pytest

from draftline.v1 import inference_pb2 as pb
from draftline_server.core.generation import (
    FinishReason,
    GenerationDelta,
    GenerationSummary,
    SpeculationStats,
    TokenLogprobs,
)
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.errors import InvalidRequestError
from draftline_server.frontend import ChatInput, TextInput, TokenIdsInput
from draftline_server.rpc import convert

EVERY_FIELD = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.5,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ("a", "b"),
    "stop_token_ids": (3, 4),
    "ignore_eos": True,
    "seed": 2**64 - 1,
    "logprobs": 3,
    "logit_bias": {1: 0.5},
    "include_stop_string": True,
    "skip_special_tokens": False,
}


def test_unset_fields_have_the_defaults_of_the_domain() -> None:
    call = convert.call_from_pb(pb.GenerateRequest(text="x"), "id")
    assert call.sampling == SamplingParams()
    assert call.speculation == SpeculationParams()
    assert (call.request_id, call.priority, call.prompt) == ("id", 0, TextInput("x"))


def test_priority_arrives() -> None:
    assert convert.call_from_pb(pb.GenerateRequest(text="x", priority=-3), "id").priority == -3


def test_every_sampling_field_arrives() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(EVERY_FIELD)
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == set(EVERY_FIELD)
    message = pb.SamplingParams(**EVERY_FIELD)  # type: ignore[arg-type]
    assert convert.sampling_from_pb(message) == SamplingParams(**EVERY_FIELD)  # type: ignore[arg-type]


def test_set_zeros_are_not_defaults() -> None:
    sampling = convert.sampling_from_pb(
        pb.SamplingParams(
            temperature=0, top_p=0, repetition_penalty=0, max_tokens=0, skip_special_tokens=False
        )
    )
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0, 0, 0)
    assert sampling.max_tokens == 0
    assert sampling.skip_special_tokens is False


def test_speculation_arrives() -> None:
    message = pb.SpeculationParams(
        enabled=False,
        max_draft_tokens=0,
        methods=[pb.SPECULATION_METHOD_DRAFT_MODEL, pb.SPECULATION_METHOD_NGRAM],
    )
    assert convert.speculation_from_pb(message) == SpeculationParams(
        enabled=False, max_draft_tokens=0, methods=("draft_model", "ngram")
    )


@pytest.mark.parametrize("value", [0, 77])
def test_method_without_a_name_is_refused(value: int) -> None:
    message = pb.SpeculationParams(methods=[pb.SPECULATION_METHOD_NGRAM, value])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match=r"speculation\.methods\[1\]"):
        convert.speculation_from_pb(message)


def test_every_method_has_a_name() -> None:
    values = set(pb.SpeculationMethod.values()) - {pb.SPECULATION_METHOD_UNSPECIFIED}
    assert set(convert.methods_to_pb(("ngram", "draft_model"))) == values


def test_inputs_are_told_apart() -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    assert convert.prompt_from_pb(pb.GenerateRequest(chat=chat)) == ChatInput((("user", "hi"),))
    assert convert.prompt_from_pb(pb.TokenizeRequest(chat=chat)) == ChatInput((("user", "hi"),))
    ids = convert.prompt_from_pb(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2])))
    assert isinstance(ids, TokenIdsInput)
    assert list(ids.ids) == [1, 2]
    for request in (pb.GenerateRequest(), pb.TokenizeRequest()):
        with pytest.raises(InvalidRequestError, match="input: is missing"):
            convert.prompt_from_pb(request)


def test_delta_becomes_a_chunk() -> None:
    logprobs = (TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.5))),)
    message = convert.chunk_to_pb(GenerationDelta("key", text="é", token_ids=(5,), logprobs=logprobs))
    top = [pb.TokenLogprob(token_id=5, logprob=-0.5), pb.TokenLogprob(token_id=6, logprob=-1.5)]
    assert message.chunk == pb.Chunk(
        text="é", token_ids=[5], logprobs=[pb.TokenLogprobs(token_id=5, logprob=-0.5, top=top)]
    )


def test_what_repeats_without_end_is_refused_without_looking_at_all_of_it() -> None:
    with pytest.raises(InvalidRequestError, match=r"^chat\.messages: 5000 messages, at most 4096 "):
        convert.prompt_from_pb(pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * 5000)))
    for name, value in (
        ("stop", ["x"] * 1_000_000),
        ("stop_token_ids", [1] * 1_000_000),
        ("logit_bias", dict.fromkeys(range(100_000), 1.0)),
    ):
        sampling = pb.SamplingParams(**{name: value})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=rf"^sampling\.{name}: .*at most "):
            convert.call_from_pb(pb.GenerateRequest(text="x", sampling=sampling), "id")
    methods = [pb.SPECULATION_METHOD_NGRAM] * 1_000_000
    speculation = convert.speculation_from_pb(pb.SpeculationParams(methods=methods))
    with pytest.raises(InvalidRequestError, match=r"^speculation\.methods: names a method twice$"):
        speculation.validate(available_methods=("ngram",), num_speculative_tokens=5)


@pytest.mark.parametrize(
    ("matched", "expected"),
    [
        (None, pb.Summary()),
        (7, pb.Summary(matched_stop_token_id=7)),
        (0, pb.Summary(matched_stop_token_id=0)),
        ("END", pb.Summary(matched_stop_string="END")),
    ],
)
def test_summary_carries_everything(matched: int | str | None, expected: pb.Summary) -> None:
    summary = GenerationSummary(
        request_id="engine's key",
        finish_reason=FinishReason.STOP if matched is not None else FinishReason.LENGTH,
        matched_stop=matched,
        num_prompt_tokens=10,
        num_output_tokens=5,
        num_cached_tokens=4,
        num_truncated_prompt_tokens=3,
        queue_seconds=0.5,
        time_to_first_token_seconds=1.0,
        end_to_end_seconds=2.0,
        speculation=SpeculationStats(2, 8, 5, [2, 2, 1], 3),
    )
    reason = pb.FINISH_REASON_STOP if matched is not None else pb.FINISH_REASON_LENGTH
    expected.MergeFrom(
        pb.Summary(
            request_id="client's id",
            finish_reason=reason,
            usage=pb.Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4),
            timings=pb.Timings(queue_ns=500_000_000, time_to_first_token_ns=10**9, end_to_end_ns=2 * 10**9),
            speculation=pb.SpeculationStats(
                drafts=2,
                draft_tokens=8,
                accepted_tokens=5,
                accepted_tokens_per_position=[2, 2, 1],
                decode_steps=3,
            ),
            num_truncated_prompt_tokens=3,
        )
    )
    assert convert.summary_to_pb(summary, "client's id") == expected
