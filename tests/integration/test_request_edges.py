"""Odd, huge and impossible parameters: refused with their field's name, or done as documented."""

from __future__ import annotations

import math
from typing import Any

import pytest

from draftline_server.core.admission import RequestLimits, admit
from draftline_server.core.generation import FinishReason, GenerationRequest
from draftline_server.core.sampling_params import MAX_SEED, SamplingParams, SpeculationParams
from draftline_server.engine import Engine
from draftline_server.errors import InvalidRequestError
from draftline_server.model.tokenizer import Tokenizer
from support.driving import Session
from support.engines import add, drain, generate, make_engine
from support.guarantees import assert_idle, assert_same_output, drafts_of, guarded, refused
from support.prompts import mixed_prompts, random_prompt
from support.reference import Reference
from support.zoo import DraftKind, ModelZoo

pytestmark = pytest.mark.usefixtures("fixed_randomness")

VOCAB_SIZE = 384
CONTEXT = 64
NAN, INFINITY = math.nan, math.inf
OFF = SpeculationParams(enabled=False)


@pytest.fixture(scope="module")
def engine(zoo: ModelZoo) -> Engine:
    """One for all: no case here may leave a trace in it."""
    return make_engine(
        zoo.target(),
        zoo.draft("noised"),
        max_context_length=CONTEXT,
        speculation={"methods": ("ngram", "draft_model"), "num_speculative_tokens": 4},
    )


# ----------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY], ids=["NaN", "+Inf", "-Inf"])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]
)
def test_a_parameter_that_is_no_finite_number_is_refused(engine: Engine, name: str, value: float) -> None:
    with guarded(engine), refused(f"sampling.{name}"):
        generate(engine, [[5]], **{name: value})


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY, 100.5], ids=["NaN", "+Inf", "-Inf", "large"])
def test_a_logit_bias_that_is_out_of_bounds_is_refused(engine: Engine, value: float) -> None:
    with guarded(engine), refused("sampling.logit_bias[7]"):
        generate(engine, [[5]], logit_bias={6: 1.0, 7: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**63),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_parameter_out_of_its_bounds_is_refused(engine: Engine, name: str, value: float) -> None:
    with guarded(engine), refused(f"sampling.{name}"):
        generate(engine, [[5]], **{name: value})


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("sampling.min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        ("sampling.stop_token_ids[1]", {"stop_token_ids": (5, VOCAB_SIZE)}),
        ("sampling.stop_token_ids", {"stop_token_ids": tuple(range(129))}),
        ("sampling.logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}),
        ("sampling.logit_bias", {"logit_bias": {-1: 1.0}}),
        ("speculation.max_draft_tokens", {"speculation": SpeculationParams(max_draft_tokens=5)}),
        ("speculation.max_draft_tokens", {"speculation": SpeculationParams(max_draft_tokens=-1)}),
        ("speculation.methods[0]", {"speculation": SpeculationParams(methods=("medusa",))}),
        ("speculation.methods", {"speculation": SpeculationParams(methods=("ngram", "ngram"))}),
    ],
)
def test_parameters_that_do_not_fit_each_other_or_the_model_are_refused(
    engine: Engine, field: str, options: dict[str, Any]
) -> None:
    with guarded(engine), refused(field):
        generate(engine, [[5]], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-30},
        {"temperature": 5e-324},
        {"temperature": 0.7, "top_p": 5e-324},
        {"temperature": 0.7, "top_p": 1e-30, "min_p": 1.0},
        {"temperature": 0.7, "min_p": 5e-324},
        {"temperature": 1e-4, "repetition_penalty": 1e-38},
        {"temperature": 0.7, "repetition_penalty": 5e-324},
        {"temperature": 1e-4, "repetition_penalty": 100.0, "logit_bias": {9: 100.0, 10: -100.0}},
    ],
    ids=str,
)
def test_a_parameter_at_the_edge_of_its_bounds_does_not_poison_the_sampler(
    engine: Engine, options: dict[str, Any]
) -> None:
    """Where a probability became NaN, token 0 would come out, which is impossible otherwise."""
    options = options | {"logit_bias": {0: -100.0} | options.get("logit_bias", {})}
    prompts = mixed_prompts(4, longest=20)[::2]
    with guarded(engine):
        drafted = generate(engine, prompts, max_tokens=10, seed=1, **options)
        plain = generate(engine, prompts, max_tokens=10, seed=1, speculation=OFF, **options)
        unseeded = generate(engine, prompts, max_tokens=10, **options)
    for one, other in zip(drafted, plain, strict=True):
        assert_same_output(one, other)
    for completion in [*drafted, *unseeded]:
        assert 0 not in completion.token_ids


def test_so_little_temperature_or_top_p_that_one_token_is_left_is_greedy(engine: Engine) -> None:
    prompts = mixed_prompts(6, longest=20)[::2]
    greedy = generate(engine, prompts, max_tokens=10)
    for options in (
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_p": 1e-30},
        {"temperature": 1.0, "top_k": 1},
    ):
        for one, other in zip(generate(engine, prompts, max_tokens=10, **options), greedy, strict=True):
            assert_same_output(one, other)


# ---------------------------------------------------------------------------------------------------- top_k


@pytest.mark.parametrize("top_k", [VOCAB_SIZE, VOCAB_SIZE + 1, 9_999_999, 2**63 - 1, 0, -1])
def test_top_k_beyond_the_vocabulary_and_none_at_all_keep_every_token(engine: Engine, top_k: int) -> None:
    prompts = mixed_prompts(4, longest=20)[::2]
    with guarded(engine):
        every = generate(engine, prompts, max_tokens=10, temperature=1.0, seed=3)
        these = generate(engine, prompts, max_tokens=10, temperature=1.0, seed=3, top_k=top_k)
    for one, other in zip(these, every, strict=True):
        assert_same_output(one, other)


def test_greedy_and_top_k_requests_in_one_batch_equal_themselves_alone(engine: Engine) -> None:
    prompts = mixed_prompts(9, longest=20)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_k": 5, "seed": 1},
        {"temperature": 1.5, "seed": 2, "top_p": 0.8, "top_k": VOCAB_SIZE + 1},
    ]
    prompts = [prompt for prompt in prompts if len(prompt) < 40]
    with guarded(engine):
        for index, prompt in enumerate(prompts):
            add(engine, str(index), prompt, max_tokens=10, **kinds[index % 3])
        together = drain(engine)
        for index, prompt in enumerate(prompts):
            alone = generate(engine, [prompt], max_tokens=10, **kinds[index % 3])[0]
            assert_same_output(together[str(index)], alone)


# -------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_without_tokens_is_refused(engine: Engine) -> None:
    with guarded(engine), refused("input"):
        generate(engine, [[]])


@pytest.mark.parametrize("text", ["", " ", "\n\t  "])
def test_an_empty_text_is_answered_only_where_the_model_has_a_token_that_begins_texts(
    zoo: ModelZoo, engine: Engine, text: str
) -> None:
    plain = Tokenizer.load(zoo.target())
    if text:
        assert len(generate(engine, [plain.encode(text)], max_tokens=4, ignore_eos=True)[0].token_ids) == 4
    else:
        with refused("text"):
            plain.encode(text)

    with_bos = Tokenizer.load(zoo.byte_fallback())
    prompt = with_bos.encode(text)
    assert prompt[0] == with_bos.bos_token_id
    other = make_engine(zoo.byte_fallback())
    with guarded(other):
        assert len(generate(other, [prompt], max_tokens=4, ignore_eos=True)[0].token_ids) == 4


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31, 2**62])
def test_a_token_id_outside_the_vocabulary_is_refused_by_its_index(engine: Engine, token_id: int) -> None:
    with guarded(engine), refused("input[2]"):
        generate(engine, [[5, 6, token_id, 7]])


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(engine: Engine, length: int) -> None:
    with guarded(engine), refused("input") as caught:
        generate(engine, [random_prompt(length, seed=1)])
    assert str(length) in caught.value.reason
    assert str(CONTEXT) in caught.value.reason


def test_a_prompt_that_leaves_room_for_one_token_gets_it(zoo: ModelZoo, engine: Engine) -> None:
    prompt = random_prompt(CONTEXT - 1, seed=2)
    expected = Reference(zoo.target()).greedy(prompt, 1)
    with guarded(engine):
        for max_tokens in (1, 100, None):
            completion = generate(engine, [prompt], max_tokens=max_tokens, ignore_eos=True)[0]
            assert completion.token_ids == expected
            assert completion.summary is not None
            assert completion.summary.finish_reason is FinishReason.LENGTH


def test_a_prompt_is_cut_from_the_left_only_where_that_is_configured_and_then_it_is_said(
    zoo: ModelZoo,
) -> None:
    engine = make_engine(
        zoo.target(), max_context_length=CONTEXT, inference={"context_overflow": "truncate_left"}
    )
    for length in (CONTEXT - 1, CONTEXT, CONTEXT + 1, 10 * CONTEXT):
        prompt = random_prompt(length, seed=length)
        with guarded(engine):
            completion = generate(engine, [prompt], max_tokens=5, ignore_eos=True)[0]
        kept = prompt[-(CONTEXT - 5) :]
        assert completion.token_ids == Reference(zoo.target()).greedy(kept, 5, ignore_eos=True)
        assert completion.summary is not None
        assert completion.summary.num_truncated_prompt_tokens == length - len(kept)
        assert completion.summary.num_prompt_tokens == len(kept)


# ----------------------------------------------------------------------------------- the end of the context


@pytest.mark.parametrize(
    ("draft", "methods"),
    [
        ("self", ("draft_model",)),
        ("noised", ("draft_model",)),
        ("noised", ("ngram", "draft_model")),
        (None, ("ngram",)),
    ],
    ids=["self", "noised", "chain", "ngram"],
)
def test_output_ends_exactly_at_the_end_of_the_context_with_and_without_drafts(
    zoo: ModelZoo, draft: DraftKind | None, methods: tuple[str, ...]
) -> None:
    engine = make_engine(
        zoo.target(),
        zoo.draft(draft) if draft is not None else None,
        # As many blocks as the context needs, and one sequence's worth for the others.
        num_blocks=2 * CONTEXT // 16,
        max_context_length=CONTEXT,
        speculation={"methods": methods, "num_speculative_tokens": 4},
    )
    reference = Reference(zoo.target())
    whole = random_prompt(CONTEXT, seed=6)
    options: dict[str, Any] = {"ignore_eos": True}
    if draft is None:
        # One token again and again, in the prompt and after it: n-gram drafts stand whole.
        whole, options = [7] * CONTEXT, options | {"logit_bias": {7: 100.0}}
    with guarded(engine):
        for room in range(1, 10):
            prompt = whole[: CONTEXT - room]
            expected = reference.greedy(prompt, room, ignore_eos=True) if draft else [7] * room
            alone = generate(engine, [prompt], max_tokens=2**31 - 1, **options)[0]
            plain = generate(engine, [prompt], speculation=OFF, **options)[0]
            add(engine, "long", prompt, **options)
            for index in range(3):
                add(engine, f"short-{index}", [5 + index], max_tokens=4, ignore_eos=True)
            batched = drain(engine)["long"]
            for completion in (alone, plain, batched):
                assert completion.token_ids == expected
                assert completion.summary is not None
                assert completion.summary.finish_reason is FinishReason.LENGTH
                assert completion.summary.num_prompt_tokens + len(completion.token_ids) == CONTEXT
    assert drafts_of(engine)[1] > 0, "nothing was drafted"


# ----------------------------------------------------------------------------------------------- max_tokens


@pytest.mark.parametrize("max_tokens", [None, CONTEXT, 2**31 - 1, 2**63 - 1])
def test_a_huge_or_missing_max_tokens_is_clamped_and_reserves_no_memory(
    engine: Engine, max_tokens: int | None
) -> None:
    with guarded(engine):
        session = Session(engine)
        session.add("huge", [5, 6, 7], max_tokens=max_tokens, ignore_eos=True)
        session.step()
        assert engine.statistics().kv_blocks_used == 1
        completion = session.drain()["huge"]
    assert len(completion.token_ids) == CONTEXT - 3


def test_max_tokens_is_clamped_to_the_servers_own_limit() -> None:
    request = admitted(max_tokens=50, min_tokens=40, limit=20)
    assert request.sampling.max_tokens == 20
    assert request.sampling.min_tokens == 20
    assert admitted(max_tokens=None, limit=20).sampling.max_tokens == 20
    assert admitted(max_tokens=7, limit=20).sampling.max_tokens == 7


def admitted(*, max_tokens: int | None, limit: int, min_tokens: int = 0) -> GenerationRequest:
    return admit(
        request_id="a",
        prompt_token_ids=[5, 6],
        sampling=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens),
        speculation=SpeculationParams(),
        limits=RequestLimits(vocab_size=VOCAB_SIZE, max_context_length=CONTEXT, max_tokens_per_request=limit),
        now=0.0,
    )


# -------------------------------------------------------------------------------------- without speculation


def test_a_draft_length_of_zero_is_speculation_switched_off_with_statistics_of_zero(zoo: ModelZoo) -> None:
    engine = make_engine(zoo.target(), zoo.draft("self"), speculation={"num_speculative_tokens": 0})
    with guarded(engine):
        completion = generate(engine, [[5, 6, 5, 6, 5, 6]], max_tokens=8)[0]
        assert completion.token_ids == Reference(zoo.target()).greedy([5, 6, 5, 6, 5, 6], 8)
    statistics = engine.statistics()
    assert not statistics.speculation_active
    assert statistics.speculation_speedup == 1.0
    assert statistics.draft_length == 0.0
    assert statistics.draft_tokens == statistics.accepted_tokens == {}, "there is no proposer"
    assert completion.summary is not None
    assert completion.summary.speculation.drafts == 0
    with pytest.raises(InvalidRequestError, match="this server's limit"):
        add(engine, "a", [5], speculation=SpeculationParams(max_draft_tokens=1))
    assert_idle(engine)


def test_drafts_longer_than_the_token_budget_are_cut_to_it(zoo: ModelZoo) -> None:
    engine = make_engine(
        zoo.target(),
        zoo.draft("self"),
        max_running=8,
        inference={"max_batched_tokens": 16},
        speculation={"methods": ("draft_model",), "num_speculative_tokens": 15},
    )
    prompts = [random_prompt(1 + seed % 3, seed=seed) for seed in range(8)]  # soon all of them decode
    reference = Reference(zoo.target())
    with guarded(engine):
        for index, prompt in enumerate(prompts):
            add(engine, str(index), prompt, max_tokens=24)
        completions: dict[str, list[int]] = {}
        largest = 0
        while engine.has_work:
            for delta in engine.step():
                completions.setdefault(delta.request_id, []).extend(delta.token_ids)
            statistics = engine.statistics()
            assert statistics.last_batch_tokens <= 16
            largest = max(largest, statistics.last_batch_size if statistics.draft_length > 0 else 0)
    assert largest == 8, "the budget was never short"
    for index, prompt in enumerate(prompts):
        assert completions[str(index)] == reference.greedy(prompt, 24)
