"""Greedy output is the target's own, token for token in float32, however it was drafted and batched."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

import pytest

from draftline_server.core.clock import Clock
from draftline_server.core.sampling_params import SpeculationParams
from draftline_server.engine import Engine
from draftline_server.model.tokenizer import Tokenizer
from support.driving import Session
from support.engines import Completion, add, drain, generate, make_engine
from support.function_models import FakeClock, FunctionRunner, dictated, letters, make_function_engine
from support.guarantees import acceptance, assert_idle, assert_same_output, assert_whole, drafts_of, guarded
from support.prompts import mixed_prompts, random_prompt
from support.reference import ReferenceOf
from support.tiny_models import FAMILIES, Family
from support.workloads import ADAPTIVE, charge_forwards
from support.zoo import ModelZoo

pytestmark = pytest.mark.usefixtures("fixed_randomness")

Source = Literal["ngram", "self", "noised", "unrelated", "chain", "head"]
SOURCES: tuple[Source, ...] = get_args(Source)
DRAFT_LENGTHS = (0, 1, 2, 4, 8)


def engine_with(
    zoo: ModelZoo,
    source: Source,
    family: Family = "llama",
    *,
    draft_length: int = 8,
    inference: dict[str, object] | None = None,
    num_blocks: int = 512,
    max_running: int = 32,
    max_batch_size: int = 64,
    max_context_length: int = 512,
    speculation: Mapping[str, object] | None = None,
    clock: Clock = time.monotonic,
) -> Engine:
    """An engine that drafts as `source` says, whether it pays or not, unless `speculation` says otherwise."""
    methods: dict[Source, tuple[str, ...]] = {"ngram": ("ngram",), "chain": ("ngram", "draft_model")}
    draft = None
    if source != "ngram":
        draft = zoo.draft("noised" if source == "chain" else source, family)
    return make_engine(
        zoo.target(family),
        draft,
        num_blocks=num_blocks,
        max_running=max_running,
        max_context_length=max_context_length,
        inference=inference,
        speculation={
            "methods": methods.get(source, ("draft_model",)),
            "num_speculative_tokens": draft_length,
            "max_batch_size": max_batch_size,
            **(speculation or {}),
        },
        clock=clock,
    )


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


# ----------------------------------------------------------------------------------------------- the matrix


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers_with_every_draft_length_in_one_batch(
    zoo: ModelZoo, reference_of: ReferenceOf, family: Family, source: Source
) -> None:
    engine = engine_with(zoo, source, family)
    reference = reference_of(zoo.target(family))
    tokenizer = Tokenizer.load(zoo.target(family))
    prompts = mixed_prompts(10)

    completions = generate(engine, prompts, max_tokens=32, draft_lengths=DRAFT_LENGTHS)

    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        assert completion.token_ids == reference.greedy(prompt, 32), f"request {index}"
        assert_whole(completion, tokenizer.decode)
    assert_drafted_as_expected(engine, source)
    assert_idle(engine)


def assert_drafted_as_expected(engine: Engine, source: Source) -> None:
    """The case is about drafts that stand, fall, or both: this sees that they did."""
    proposers, drafted, accepted = drafts_of(engine)
    assert proposers == {"ngram": {"ngram"}, "chain": {"draft_model", "ngram"}}.get(source, {"draft_model"})
    match source:
        case "self":
            assert accepted == drafted
        case "unrelated" | "head":
            assert accepted < drafted / 5
        case "noised" | "chain":
            assert drafted / 10 < accepted < drafted
        case "ngram":
            assert accepted < drafted


@pytest.mark.parametrize("batch_size", [1, 8, 32])
@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
def test_greedy_output_depends_on_neither_draft_length_nor_batch_size(
    zoo: ModelZoo, reference_of: ReferenceOf, draft_length: int, batch_size: int
) -> None:
    engine = engine_with(zoo, "chain", draft_length=draft_length)
    prompts = mixed_prompts(batch_size)

    completions = generate(engine, prompts, max_tokens=32)

    reference = reference_of(zoo.target())
    assert tokens_of(completions) == [reference.greedy(prompt, 32) for prompt in prompts]


@pytest.mark.parametrize("source", ["ngram", "self", "noised", "unrelated"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_greedy_output_is_that_of_transformers_where_the_controller_picks_the_lengths(
    zoo: ModelZoo, reference_of: ReferenceOf, family: Family, source: Source
) -> None:
    clock = FakeClock()
    # One-token matches, so that there is always an n-gram draft, and mostly a wrong one.
    engine = engine_with(zoo, source, family, speculation={**ADAPTIVE, "ngram_min": 1}, clock=clock)
    charge_forwards(engine, clock)
    reference = reference_of(zoo.target(family))
    prompts = mixed_prompts(9)
    for batch in (prompts[:1], prompts[1:]):
        completions = generate(engine, batch, max_tokens=40, ignore_eos=True)
        assert tokens_of(completions) == [reference.greedy(prompt, 40, ignore_eos=True) for prompt in batch]
    assert_drafted_as_expected(engine, source)
    if source == "unrelated":
        assert engine.statistics().fallbacks, "it was never switched off"
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers_in_the_whole_matrix(
    zoo: ModelZoo, reference_of: ReferenceOf, family: Family, source: Source
) -> None:
    reference = reference_of(zoo.target(family))
    prompts = mixed_prompts(32)
    expected = [reference.greedy(prompt, 32) for prompt in prompts]
    for draft_length in DRAFT_LENGTHS:
        engine = engine_with(zoo, source, family, draft_length=draft_length)
        for batch_size in (1, 8, 32):
            # A batch of its own kind each time: the last prompts, so that sizes differ in content, too.
            completions = generate(engine, prompts[-batch_size:], max_tokens=32)
            assert tokens_of(completions) == expected[-batch_size:], (draft_length, batch_size)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(384, 448), (448, 384)])
def test_embedding_rows_that_one_model_has_more_than_the_other_do_no_harm(
    zoo: ModelZoo, reference_of: ReferenceOf, target_rows: int, draft_rows: int
) -> None:
    target = zoo.padded(target_rows, seed=0)
    draft = zoo.padded(draft_rows, seed=1)
    engine = make_engine(
        target, draft, speculation={"methods": ("draft_model",), "num_speculative_tokens": 4}
    )
    # With random weights, rows that stand for no token are as likely as others. The prompt has some, too.
    prompts = [random_prompt(20, seed=seed, vocab_size=target_rows) for seed in range(6)]

    completions = generate(engine, prompts, max_tokens=16, ignore_eos=True)

    reference = reference_of(target)
    assert tokens_of(completions) == [reference.greedy(p, 16, ignore_eos=True) for p in prompts]
    assert max(max(tokens) for tokens in tokens_of(completions)) >= 384 or target_rows == 384


# --------------------------------------------------------------------------------------- company in a batch


def test_a_step_is_one_forward_of_the_target_whatever_its_rows_are_for() -> None:
    target = dictated(range(5, 60), prompt_length=3)
    engine = make_function_engine(
        target,
        target,
        decode=letters,
        speculation={"methods": ("draft_model",), "num_speculative_tokens": 4},
    )
    runner = cast(FunctionRunner, engine._parts.target)
    add(engine, "verified", [1, 2, 3], max_tokens=30)
    add(engine, "decoded", [1, 2, 4], max_tokens=30, speculation=SpeculationParams(enabled=False))
    engine.step()
    add(engine, "prefilled", [1, 2, 3] * 7, max_tokens=30)
    sizes: list[int] = []
    while engine.has_work:
        before = runner.num_forwards
        engine.step()
        assert runner.num_forwards == before + 1
        sizes.append(engine.statistics().last_batch_tokens)
    # A token and four drafts, a token, and a prompt.
    assert sizes[0] == 5 + 1 + 21
    assert_idle(engine)


def test_drafting_differently_for_each_request_of_a_batch_changes_nothing(
    zoo: ModelZoo, reference_of: ReferenceOf
) -> None:
    engine = engine_with(zoo, "chain")
    wishes = [
        SpeculationParams(enabled=False),
        SpeculationParams(max_draft_tokens=0),
        SpeculationParams(max_draft_tokens=3, methods=("ngram",)),
        SpeculationParams(methods=("draft_model",)),
        SpeculationParams(methods=("draft_model", "ngram"), max_draft_tokens=2),
        SpeculationParams(),
    ]
    prompts = mixed_prompts(2 * len(wishes))
    for index, prompt in enumerate(prompts):
        add(engine, str(index), prompt, max_tokens=20 + index, speculation=wishes[index % len(wishes)])
    completions = drain(engine)

    reference = reference_of(zoo.target())
    for index, prompt in enumerate(prompts):
        completion = completions[str(index)]
        assert completion.token_ids == reference.greedy(prompt, 20 + index), f"request {index}"
        assert completion.summary is not None
        if index % len(wishes) < 2:
            assert completion.summary.speculation.drafts == 0
    assert_idle(engine)


@pytest.mark.parametrize("num_others", [1, 7, 31])
def test_a_greedy_request_gets_its_solo_output_beside_sampled_ones(zoo: ModelZoo, num_others: int) -> None:
    engine = engine_with(zoo, "chain", draft_length=4)
    prompts = mixed_prompts(1 + num_others, seed=5)
    for index, prompt in enumerate(prompts):
        # Greedy, seeded and unseeded neighbours, which end at different times.
        temperature = 0.0 if index % 3 == 0 else 1.2
        add(
            engine,
            str(index),
            prompt,
            max_tokens=6 + 5 * index % 20,
            temperature=temperature,
            seed=index if index % 3 == 1 else None,
            top_k=20 if index % 2 else 0,
            frequency_penalty=0.5 if index % 5 == 1 else 0.0,
        )
    together = drain(engine)

    for index in range(0, len(prompts), 3):
        solo = generate(engine, [prompts[index]], max_tokens=6 + 5 * index % 20)[0]
        if index % 5 != 1:
            assert_same_output(together[str(index)], solo)
    for index in range(1, len(prompts), 9):
        solo = generate(
            engine,
            [prompts[index]],
            max_tokens=6 + 5 * index % 20,
            temperature=1.2,
            seed=index,
            top_k=20 if index % 2 else 0,
            frequency_penalty=0.5 if index % 5 == 1 else 0.0,
        )[0]
        assert_same_output(together[str(index)], solo)


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6])
def test_exactly_max_tokens_come_and_the_first_is_the_targets_own(
    zoo: ModelZoo, reference_of: ReferenceOf, max_tokens: int
) -> None:
    """k is 4: one token, two, and on both sides of a whole draft and its bonus."""
    prompts = mixed_prompts(5)
    for source in ("self", "unrelated"):
        engine = engine_with(zoo, source, draft_length=4)
        with guarded(engine):
            completions = generate(engine, prompts, max_tokens=max_tokens, ignore_eos=True)
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = reference_of(zoo.target()).greedy(prompt, 6, ignore_eos=True)
            assert completion.token_ids == expected[:max_tokens]
            assert completion.summary is not None
            assert completion.summary.finish_reason.value == "length"


@pytest.mark.parametrize("max_batched_tokens", [24, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_prefilled_in_chunks_give_the_same_output(
    zoo: ModelZoo, reference_of: ReferenceOf, family: Family, max_batched_tokens: int
) -> None:
    """Short chunks and long ones, which attend by different code; both begin and end inside of windows."""
    engine = engine_with(
        zoo,
        "chain",
        family,
        draft_length=4,
        max_running=6,
        inference={"max_batched_tokens": max_batched_tokens},
        max_context_length=400,
    )
    prompts = [random_prompt(length, seed=length) for length in (1, 23, 24, 25, 49, 97, 150, 300)]
    session = Session(engine)
    for index, prompt in enumerate(prompts):
        session.add(str(index), prompt, max_tokens=20)
    while engine.has_work:
        session.step()
        # So the longest prompt takes five steps or more.
        assert engine.statistics().last_batch_tokens <= max_batched_tokens
    assert_idle(engine)

    reference = reference_of(zoo.target(family))
    for index, prompt in enumerate(prompts):
        assert session.completions[str(index)].token_ids == reference.greedy(prompt, 20), f"request {index}"


def test_requests_that_join_and_leave_at_any_step_get_their_solo_output(
    zoo: ModelZoo, reference_of: ReferenceOf
) -> None:
    """Also switches drafting off and on between steps: three sequences are one too many for it."""
    engine = engine_with(zoo, "self", draft_length=4, max_batch_size=2)
    prompts = mixed_prompts(9, seed=3)
    max_tokens = [100, 90, *(5 + 3 * index for index in range(7))]
    arrivals = dict(enumerate(prompts[2:]))  # one more every eighth step
    for index in (0, 1):
        add(engine, str(index), prompts[index], max_tokens=max_tokens[index], ignore_eos=True)
    completions = {str(index): Completion() for index in range(len(prompts))}
    draft_lengths: list[float] = []
    for step in range(400):
        if step % 8 == 4 and step // 8 in arrivals:
            index = step // 8 + 2
            add(engine, str(index), prompts[index], max_tokens=max_tokens[index], ignore_eos=True)
        for delta in engine.step():
            completions[delta.request_id].token_ids.extend(delta.token_ids)
            completions[delta.request_id].summary = delta.summary
        draft_lengths.append(engine.statistics().draft_length)
    assert_idle(engine)

    reference = reference_of(zoo.target())
    for index, prompt in enumerate(prompts):
        expected = reference.greedy(prompt, max_tokens[index], ignore_eos=True)
        assert completions[str(index)].token_ids == expected, f"request {index}"
    changes = sum((a == 0) != (b == 0) for a, b in itertools.pairwise(draft_lengths))
    assert changes >= 6, "drafting was hardly ever switched"
    # Speculation was off for a while, and the draft's cache caught up: each draft of the target's own stands.
    for completion in completions.values():
        assert completion.summary is not None
        assert completion.summary.speculation.accepted_tokens == completion.summary.speculation.draft_tokens


# ----------------------------------------------------------------------------------------------- self-draft


@pytest.mark.parametrize("streams", [1, 16])
def test_a_draft_equal_to_the_target_is_always_accepted(zoo: ModelZoo, streams: int) -> None:
    """The best oracle there is: any slip in the draft's positions or cache shows as a rejection."""
    engine = engine_with(zoo, "self", draft_length=4, num_blocks=1024)
    num_tokens = 256
    shared = random_prompt(40, seed=77)
    for prompts in (
        mixed_prompts(streams, seed=8),
        mixed_prompts(streams, seed=8),  # everything from the prefix cache
        [[*shared, *prompt] for prompt in mixed_prompts(streams, seed=9)],
        [[*shared, *prompt] for prompt in mixed_prompts(streams, seed=10)],
    ):
        for completion in generate(engine, prompts, max_tokens=num_tokens, ignore_eos=True):
            assert acceptance(completion) == 1.0
            assert completion.summary is not None
            stats = completion.summary.speculation
            # Five tokens a step from the first to the last quarter; prefill gives one.
            assert stats.decode_steps == 1 + -(-(num_tokens - 1) // 5)
    assert engine.statistics().prefix_cache_hits > 0
