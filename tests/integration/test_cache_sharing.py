"""Prefix hits, preemption and aborts leave every request with the output it would have had alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from draftline_server.core.sampling_params import SpeculationParams
from draftline_server.engine import Engine
from draftline_server.errors import CancelledError, InvalidRequestError
from support.driving import Session
from support.engines import add, drain, generate, make_engine
from support.guarantees import acceptance, assert_idle, assert_same_output, guarded, refused
from support.prompts import mixed_prompts, random_prompt
from support.reference import ReferenceOf
from support.tiny_models import FAMILIES, Family
from support.zoo import DraftKind, ModelZoo

BLOCK_SIZE = 16
DRAFT_LENGTHS = (1, 2, 4, 8)
# Of some, layers with a sliding window of one block.
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
SOURCES: dict[str, tuple[DraftKind | None, tuple[str, ...]]] = {
    "ngram": (None, ("ngram",)),
    "self": ("self", ("draft_model",)),
    "noised": ("noised", ("draft_model",)),
    "unrelated": ("unrelated", ("draft_model",)),
    "chain": ("noised", ("ngram", "draft_model")),
    "head": ("head", ("draft_model",)),
}
EVERY_SOURCE = pytest.mark.parametrize(("draft", "methods"), SOURCES.values(), ids=SOURCES)


def engine_of(
    zoo: ModelZoo,
    draft: DraftKind | None = "noised",
    family: Family = "llama",
    *,
    num_blocks: int = 256,
    max_context_length: int = 256,
    max_batched_tokens: int = 2048,
    prefix_caching: bool = True,
    methods: tuple[str, ...] = ("draft_model",),
    draft_length: int = 4,
) -> Engine:
    return make_engine(
        zoo.target(family),
        zoo.draft(draft, family) if draft is not None else None,
        num_blocks=num_blocks,
        max_context_length=max_context_length,
        inference={"prefix_caching": prefix_caching, "max_batched_tokens": max_batched_tokens},
        speculation={"methods": methods, "num_speculative_tokens": draft_length},
    )


# ---------------------------------------------------------------------------------------------- prefix hits


@EVERY_FAMILY
def test_the_same_prompt_again_is_read_from_the_cache_and_gives_the_same_output(
    zoo: ModelZoo, reference_of: ReferenceOf, family: Family
) -> None:
    engine = engine_of(zoo, "self", family)
    for length in (15, 16, 17, 32, 33, 63, 64):
        prompt = random_prompt(length, seed=length)
        expected = reference_of(zoo.target(family)).greedy(prompt, 20, ignore_eos=True)

        first, second = (generate(engine, [prompt], max_tokens=20, ignore_eos=True)[0] for _ in range(2))

        assert first.summary is not None
        assert second.summary is not None
        assert first.token_ids == second.token_ids == expected
        assert first.summary.num_cached_tokens == 0
        # Never the last token: its logits are needed.
        assert second.summary.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert acceptance(first) == acceptance(second) == 1.0


@EVERY_SOURCE
@EVERY_FAMILY
def test_prompts_that_come_again_get_the_same_output_whoever_drafts(
    zoo: ModelZoo,
    reference_of: ReferenceOf,
    family: Family,
    draft: DraftKind | None,
    methods: tuple[str, ...],
) -> None:
    engine = engine_of(zoo, draft, family, methods=methods, draft_length=max(DRAFT_LENGTHS))
    prompts = mixed_prompts(8, longest=60, seed=5)
    reference = reference_of(zoo.target(family))
    expected = [reference.greedy(prompt, 32, ignore_eos=True) for prompt in prompts]
    for draft_lengths in (DRAFT_LENGTHS, DRAFT_LENGTHS[::-1]):
        completions = generate(engine, prompts, draft_lengths=draft_lengths, max_tokens=32, ignore_eos=True)
        assert [completion.token_ids for completion in completions] == expected
    cached = [completion.summary.num_cached_tokens for completion in completions if completion.summary]
    assert cached == [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
    assert sum(cached) > 0


@EVERY_FAMILY
def test_prompts_that_begin_alike_share_blocks_while_both_run(
    zoo: ModelZoo, reference_of: ReferenceOf, family: Family
) -> None:
    engine = engine_of(zoo, "noised", family)
    shared = random_prompt(3 * BLOCK_SIZE, seed=1)
    prompts = [[*shared, *random_prompt(5 + index, seed=10 + index)] for index in range(6)]
    session = Session(engine)
    session.add("0", prompts[0], max_tokens=30)
    session.step(3)
    for index in range(1, 6):
        session.add(str(index), prompts[index], max_tokens=30)
    session.step()
    assert engine.statistics().kv_blocks_used < 6 * 4, "nothing is shared"
    completions = session.drain()

    reference = reference_of(zoo.target(family))
    for index, prompt in enumerate(prompts):
        completion = completions[str(index)]
        assert completion.token_ids == reference.greedy(prompt, 30)
        assert completion.summary is not None
        assert completion.summary.num_cached_tokens == (3 * BLOCK_SIZE if index else 0)
    assert_idle(engine)


@EVERY_FAMILY
def test_output_of_one_request_is_found_by_another_that_goes_on_from_it(
    zoo: ModelZoo, reference_of: ReferenceOf, family: Family
) -> None:
    """A conversation: the next prompt is the last one, its answer, and more."""
    engine = engine_of(zoo, "self", family)
    reference = reference_of(zoo.target(family))
    prompt = random_prompt(20, seed=3)
    for turn in range(4):
        completion = generate(engine, [prompt], max_tokens=24, ignore_eos=True)[0]
        assert completion.token_ids == reference.greedy(prompt, 24, ignore_eos=True)
        assert acceptance(completion) == 1.0
        assert completion.summary is not None
        if turn:
            assert completion.summary.num_cached_tokens >= len(prompt) - 2 * BLOCK_SIZE
        prompt = [*prompt, *completion.token_ids, *random_prompt(7, seed=turn)]


@EVERY_FAMILY
def test_cached_blocks_that_the_draft_never_read_do_not_spoil_its_drafts(
    zoo: ModelZoo, family: Family
) -> None:
    engine = engine_of(zoo, "self", family)
    prompt = random_prompt(70, seed=4)
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    plain = generate(engine, [prompt], speculation=SpeculationParams(enabled=False), **options)[0]
    for _ in range(2):
        drafted = generate(engine, [prompt], **options)[0]
        assert drafted.token_ids == plain.token_ids
        assert drafted.summary is not None
        assert drafted.summary.num_cached_tokens == 64
        assert acceptance(drafted) == 1.0
    # Two at once: both catch up in the same shared blocks.
    longer = generate(engine, [[*prompt, 9], [*prompt, 10]], **options)
    assert all(acceptance(completion) == 1.0 for completion in longer)


def test_aborting_one_of_two_requests_that_share_blocks_does_not_touch_the_other(
    zoo: ModelZoo, reference_of: ReferenceOf
) -> None:
    reference = reference_of(zoo.target())
    shared = random_prompt(4 * BLOCK_SIZE, seed=6)
    prompts = {name: [*shared, *random_prompt(3, seed=seed)] for seed, name in enumerate("abc")}
    for aborted_after in (0, 1, 2, 4):
        engine = engine_of(zoo, "noised", num_blocks=24)
        generate(engine, [shared], max_tokens=1)
        with guarded(engine):
            session = Session(engine)
            for name in "ab":
                session.add(name, prompts[name], max_tokens=24)
            session.step(aborted_after)
            session.abort("a", CancelledError("the client went away"))
            # Takes the blocks that were just freed.
            session.add("c", prompts["c"], max_tokens=24)
            completions = session.drain()
            assert completions["b"].token_ids == reference.greedy(prompts["b"], 24)
            assert completions["c"].token_ids == reference.greedy(prompts["c"], 24)
            assert isinstance(completions["a"].error, CancelledError)


def test_a_prefix_is_never_taken_from_a_request_with_another_one(
    zoo: ModelZoo, reference_of: ReferenceOf
) -> None:
    """Same tokens in a block, other tokens before it: the hash must cover the whole prefix."""
    engine = engine_of(zoo, "self")
    same = random_prompt(BLOCK_SIZE, seed=7)
    prompts = [[*random_prompt(BLOCK_SIZE, seed=seed), *same, *same, 5] for seed in range(4)]
    reference = reference_of(zoo.target())
    for prompt in [*prompts, [*same, *same, *same, 5]]:
        completion = generate(engine, [prompt], max_tokens=20)[0]
        assert completion.token_ids == reference.greedy(prompt, 20)
        assert completion.summary is not None
        assert completion.summary.num_cached_tokens == 0


def test_switching_prefix_caching_off_changes_only_what_is_cached(zoo: ModelZoo) -> None:
    engine = engine_of(zoo, "noised", prefix_caching=False)
    prompt = random_prompt(50, seed=8)
    first, second = (generate(engine, [prompt], max_tokens=20)[0] for _ in range(2))
    assert_same_output(first, second)
    assert engine.statistics().prefix_cache_hits == 0


# ---------------------------------------------------------------------------------------- too little memory


@EVERY_SOURCE
@EVERY_FAMILY
def test_preempted_requests_get_the_same_output(
    zoo: ModelZoo,
    reference_of: ReferenceOf,
    family: Family,
    draft: DraftKind | None,
    methods: tuple[str, ...],
) -> None:
    engine = engine_of(zoo, draft, family, num_blocks=20, methods=methods, draft_length=max(DRAFT_LENGTHS))
    prompts = mixed_prompts(8, longest=60, seed=2)

    completions = generate(engine, prompts, draft_lengths=DRAFT_LENGTHS, max_tokens=50, ignore_eos=True)

    assert engine.statistics().num_preemptions > 0
    reference = reference_of(zoo.target(family))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == reference.greedy(prompt, 50, ignore_eos=True)
        if draft == "self":
            assert acceptance(completion) == 1.0


def test_a_pool_for_little_more_than_one_request_serves_32_of_them_in_the_end(zoo: ModelZoo) -> None:
    context = 128
    num_blocks = context // BLOCK_SIZE * 12 // 10
    source = random.Random(45)
    prompts = [random_prompt(source.randint(1, 100), seed=index) for index in range(32)]
    max_tokens = [min(source.randint(1, context - len(prompt)), 40) for prompt in prompts]
    roomy = engine_of(zoo, "noised", max_context_length=context, prefix_caching=False)
    tight = engine_of(zoo, "noised", max_context_length=context, num_blocks=num_blocks)
    completions = []
    with guarded(tight):
        for engine in (roomy, tight):
            for index, prompt in enumerate(prompts):
                add(engine, str(index), prompt, max_tokens=max_tokens[index], ignore_eos=True)
            completions.append(drain(engine))
    assert tight.statistics().num_preemptions > 0
    for index in range(32):
        assert_same_output(completions[1][str(index)], completions[0][str(index)])
        assert len(completions[1][str(index)].token_ids) == max_tokens[index]


def test_a_request_that_can_never_fit_is_refused_at_once(zoo: ModelZoo) -> None:
    """The pool always has room for the context (start-up sees to it), so the context is the bound."""
    engine = engine_of(zoo, num_blocks=9, max_context_length=128)
    with guarded(engine), refused("input"):
        add(engine, "too-long", random_prompt(128, seed=1))
    with guarded(engine):
        assert len(generate(engine, [random_prompt(127, seed=1)], ignore_eos=True)[0].token_ids) == 1
        assert len(generate(engine, [[5]], max_tokens=500, ignore_eos=True)[0].token_ids) == 127


def test_the_first_in_order_is_never_the_one_preempted(zoo: ModelZoo) -> None:
    engine = engine_of(zoo, "noised", num_blocks=17, max_context_length=256)
    for index in range(4):
        prompt = random_prompt(30, seed=index)
        add(engine, str(index), prompt, max_tokens=100, ignore_eos=True, priority=1 if index == 3 else 0)
    ended: list[str] = []
    while engine.has_work:
        ended += [delta.request_id for delta in engine.step() if delta.is_final]
    assert ended[0] == "3", "the one of higher priority comes first"
    assert sorted(ended) == ["0", "1", "2", "3"]
    assert engine.statistics().num_preemptions > 0
    assert_idle(engine)


def test_a_step_never_computes_more_tokens_than_its_budget(zoo: ModelZoo) -> None:
    engine = engine_of(zoo, "self", max_batched_tokens=32)
    for index, prompt in enumerate(mixed_prompts(20, seed=12)):
        add(engine, str(index), prompt, max_tokens=20, ignore_eos=True)
    while engine.has_work:
        engine.step()
        assert engine.statistics().last_batch_tokens <= 32
    assert_idle(engine)


def test_refusals_do_not_depend_on_how_full_the_pool_is(zoo: ModelZoo) -> None:
    engine = engine_of(zoo, num_blocks=16, max_context_length=256)
    add(engine, "large", random_prompt(200, seed=1), max_tokens=56, ignore_eos=True)
    engine.step()
    with pytest.raises(InvalidRequestError):
        add(engine, "too-long", random_prompt(256, seed=2))
    add(engine, "waits", random_prompt(200, seed=3), max_tokens=5)
    completions = drain(engine)
    assert completions["waits"].summary is not None
    assert_idle(engine)
