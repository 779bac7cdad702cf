"""What a client may ask for: every bound from both sides, and every message names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from draftline_server.core.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_SEED,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    SpeculationParams,
)
from draftline_server.errors import InvalidRequestError

VOCAB_SIZE = 100

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-300},
    {"temperature": 100.0},
    {"top_p": 1.0},
    {"top_p": 1e-300},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": VOCAB_SIZE + 1},
    {"top_k": 2**63 - 1},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 100.0},
    {"max_tokens": 1},
    {"max_tokens": 2**63 - 1},
    {"min_tokens": 5, "max_tokens": 5},
    {"min_tokens": 2**40},
    {"seed": 0},
    {"seed": MAX_SEED},
    {"logprobs": 0},
    {"logprobs": 20},
    {"stop": ("x" * MAX_STOP_STRING_LENGTH,) * MAX_STOP_STRINGS},
    {"stop_token_ids": (0, VOCAB_SIZE - 1)},
    {"logit_bias": {0: -100.0, VOCAB_SIZE - 1: 100.0}},
]

REFUSED: list[tuple[str, dict[str, Any]]] = [
    *[
        (name, {name: value})
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        for value in (math.nan, math.inf, -math.inf)
    ],
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 100.1}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.001}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 2**64}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("frequency_penalty", {"frequency_penalty": 2.1}),
    ("presence_penalty", {"presence_penalty": -2.1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": 100.1}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 2**64}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**65}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": 21}),
    ("stop[0]", {"stop": ("",)}),
    ("stop[1]", {"stop": ("x", "")}),
    ("stop[0]", {"stop": ("x" * (MAX_STOP_STRING_LENGTH + 1),)}),
    ("stop", {"stop": ("x",) * (MAX_STOP_STRINGS + 1)}),
    ("stop_token_ids[0]", {"stop_token_ids": (VOCAB_SIZE,)}),
    ("stop_token_ids[1]", {"stop_token_ids": (0, -1)}),
    ("stop_token_ids", {"stop_token_ids": (1,) * (MAX_STOP_TOKEN_IDS + 1)}),
    ("logit_bias", {"logit_bias": {VOCAB_SIZE: 0.0}}),
    ("logit_bias", {"logit_bias": {-1: 0.0}}),
    ("logit_bias[3]", {"logit_bias": {3: math.nan}}),
    ("logit_bias[3]", {"logit_bias": {3: 100.5}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 0.0)}),
]


def _id(fields: dict[str, Any]) -> str:
    name, value = next(iter(fields.items()), ("defaults", ""))
    return f"{name}-{value}"[:40]


@pytest.mark.parametrize("fields", [pytest.param(f, id=_id(f)) for f in ACCEPTED])
def test_accepts(fields: dict[str, Any]) -> None:
    SamplingParams(**fields).validate(VOCAB_SIZE)


@pytest.mark.parametrize(("field", "fields"), [pytest.param(n, f, id=_id(f)) for n, f in REFUSED])
def test_refuses_and_names_the_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields).validate(VOCAB_SIZE)
    assert caught.value.field.startswith(f"sampling.{field}")
    assert str(caught.value).startswith(f"sampling.{field}")
    assert len(str(caught.value)) < 200, "a long value is not repeated"


def test_the_message_says_what_was_given_and_what_is_allowed() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(top_p=1.5).validate(VOCAB_SIZE)
    assert caught.value.reason == "1.5 is not in (0, 1]"


def test_no_more_logprobs_than_tokens_in_the_vocabulary() -> None:
    SamplingParams(logprobs=5).validate(5)
    with pytest.raises(InvalidRequestError, match=r"sampling\.logprobs: 6 is not in \[0, 5\]"):
        SamplingParams(logprobs=6).validate(5)


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0.0, True), (1e-300, True), (1e-6, True), (1e-3, False), (1.0, False)]
)
def test_the_smallest_temperatures_are_greedy(temperature: float, *, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, False, id="none"),
        pytest.param({"frequency_penalty": 0.1}, True, id="frequency"),
        pytest.param({"presence_penalty": -0.1}, True, id="presence"),
        pytest.param({"repetition_penalty": 1.1}, True, id="repetition"),
    ],
)
def test_has_penalties(fields: dict[str, float], *, expected: bool) -> None:
    assert SamplingParams(**fields).has_penalties is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SpeculationParams(), id="defaults"),
        pytest.param(SpeculationParams(enabled=False, max_draft_tokens=0), id="off"),
        pytest.param(SpeculationParams(max_draft_tokens=5, methods=("draft_model", "ngram")), id="all"),
    ],
)
def test_accepts_speculation(params: SpeculationParams) -> None:
    params.validate(available_methods=("ngram", "draft_model"), num_speculative_tokens=5)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        pytest.param(
            SpeculationParams(max_draft_tokens=6),
            "speculation.max_draft_tokens: 6 is not in [0, 5], this server's limit",
            id="too-many",
        ),
        pytest.param(
            SpeculationParams(max_draft_tokens=-1),
            "speculation.max_draft_tokens: -1 is not in [0, 5], this server's limit",
            id="negative",
        ),
        pytest.param(
            SpeculationParams(methods=("ngram", "medusa")),
            "speculation.methods[1]: medusa is not available here (there is: ngram)",
            id="unknown-method",
        ),
        pytest.param(
            SpeculationParams(methods=("ngram", "ngram")),
            "speculation.methods: names a method twice",
            id="twice",
        ),
    ],
)
def test_refuses_speculation(params: SpeculationParams, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params.validate(available_methods=("ngram",), num_speculative_tokens=5)
    assert str(caught.value) == message


def test_a_server_without_methods_says_so() -> None:
    with pytest.raises(InvalidRequestError, match=r"there is: none"):
        SpeculationParams(methods=("ngram",)).validate(available_methods=(), num_speculative_tokens=0)
